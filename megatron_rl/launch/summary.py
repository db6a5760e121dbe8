"""summary.json: what a run reached, and where its time went."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.launch import metrics_file
from megatron_rl.transports.atomic import write_atomic

PHASES = ("setup", "engine_start", "sft", "rl", "eval")


@dataclass
class Clock:
    """Wall-clock seconds of the phases. engine_start overlaps sft: the engines start while the warm-up trains."""

    started: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, phase: str, since: float) -> None:
        """`phase` has lasted from `since` (time.monotonic) until now."""
        self.seconds[phase] = time.monotonic() - since

    @property
    def wall(self) -> float:
        return time.monotonic() - self.started


def summarize(run_dir: Path, clock: Clock) -> dict[str, Any]:
    """The summary of a finished run; a number that does not apply is absent."""
    steps, evals = metrics_file.read(run_dir / "metrics.jsonl")
    scores = [score for line in evals if (score := metrics_file.exact_match(line)) is not None]
    phases = dict(clock.seconds)
    spent = sum(line.get("time/eval", 0.0) for line in evals)
    if spent:
        phases["eval"] = spent
        phases["rl"] = max(0.0, phases.get("rl", spent) - spent)
    summary: dict[str, Any] = {"eval_before": scores[0], "eval_after": scores[-1]} if scores else {}
    summary["steps"] = steps[-1]["step"] if steps else 0
    summary["wall_seconds"] = round(clock.wall, 3)
    summary["phases"] = {phase: round(phases[phase], 3) for phase in PHASES if phase in phases}
    return summary


def write(run_dir: Path, clock: Clock) -> dict[str, Any]:
    """Write summary.json and return it."""
    summary = summarize(run_dir, clock)
    write_atomic(run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
    return summary
