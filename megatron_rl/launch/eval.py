"""`megatron-rl eval`: engines for an HF directory, one evaluation, a table and a JSON file."""

import json
import secrets
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as Grid

from megatron_rl.config.run import EvalRunConfig, ResumeConfig
from megatron_rl.launch import preflight, run_dir, summary
from megatron_rl.launch.commands import TOKEN, module, run_environment
from megatron_rl.launch.display import Display
from megatron_rl.launch.engines import Engines
from megatron_rl.launch.processes import Supervisor


def main(config: EvalRunConfig, command: Sequence[str], console: Console) -> None:
    """The whole evaluation. ConfigError before anything starts, RunFailed when a process dies."""
    clock = summary.Clock()
    preflight.check(config)
    run = run_dir.open_run(config, config.run, ResumeConfig(), command)
    results = run.path / "eval" / "results.json"
    environment = {TOKEN: secrets.token_hex(16), **run_environment()}
    with Display(console, run.path) as display, Supervisor(run.logs, environment) as supervisor:
        display.say(f"run directory {run.path}, attempt {run.attempt}; logs in {run.logs}")
        engines = Engines(config, run.resolved, supervisor, display, clock)
        clock.add("setup", clock.started)
        started = time.monotonic()
        evaluator = supervisor.start("evaluator", module("evaluator", str(run.resolved), str(results), *engines.urls))
        supervisor.wait(evaluator, tick=engines.tick)
        clock.add("eval", started)
        display.say(f"done in {clock.wall:.1f} s; results in {results}")
    show(json.loads(results.read_text()), console)


def show(metrics: dict[str, float], console: Console) -> None:
    """One row per source."""
    found = [key.split("/", 2)[1:] for key in metrics if key.startswith("eval/")]
    names = list(dict.fromkeys(name for _, name in found))
    grid = Grid("source", *names, title="evaluation", title_justify="left")
    for source in dict.fromkeys(source for source, _ in found):
        values = [metrics.get(f"eval/{source}/{name}") for name in names]
        grid.add_row(source, *("" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    console.print(grid)
