"""Runs on every rank: the RL trainer replays the same dumped batches in several layouts. Started by test_layouts.py."""

import json
import os
from pathlib import Path

from megatron_rl import platform


def main(args: list[str]) -> dict[str, list[dict] | str]:
    """args: the work directory, then the names of layouts.json's cases. Returns each case's metrics lines, or why it was refused."""
    platform.install()
    from megatron_rl.config.base import ConfigError
    from megatron_rl.trainer import rl
    from megatron_rl.transports.batches.filesystem import ReplayClient

    work = Path(args[0])
    cases = json.loads((work / "layouts.json").read_text())
    world, lines = None, {}
    for name in args[1:]:
        case = cases[name]
        config = rl_config(work, name, case)
        checkpoint = work / "runs" / case["resume_from"] if "resume_from" in case else None
        if os.environ["RANK"] == "0":
            Path(config.run.dir).mkdir(parents=True)
        world = regroup(config.trainer.parallel, world)
        try:
            rl.main(config, world, ReplayClient(Path(config.trainer.replay)), checkpoint)
        except ConfigError as error:
            lines[name] = str(error)
            continue
        if os.environ["RANK"] == "0":
            lines[name] = [json.loads(line) for line in (work / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return lines


def regroup(parallel, world):
    """The first layout joins the ranks; the next ones split the same ranks anew."""
    from megatron.core import parallel_state

    from megatron_rl.platform.world import split

    if world is None:
        return platform.initialize(parallel, seed=0, timeout_s=120.0, threads=1)
    parallel_state.destroy_model_parallel()
    return split(parallel, seed=0, timeout_s=120.0)


def rl_config(work: Path, name: str, case: dict):
    from megatron_rl.config.run import RLConfig

    return RLConfig.model_validate(
        {
            "run": {"name": name, "root": str(work / "runs")},
            "model": {"path": str(work / case.get("model", "model")), "dtype": "float32", "context": 64},
            "trainer": {
                "steps": case.get("steps", 2),
                "replay": str(work / case.get("batches", "batches")),
                "moe": case.get("moe", {}),
                "parallel": case.get("parallel", {}),
                "optim": {"lr": 1e-3, "clip_grad": 0.5},
                "recompute": case.get("recompute", "none"),
                "head_chunk_tokens": case.get("head_chunk_tokens", 1024),
                "checkpoint": {"interval": 1},
                **case.get("memory", {}),
            },
            "train": {"source": [{"id": "none", "env": {"path": "unused.py"}}]},
        }
    )
