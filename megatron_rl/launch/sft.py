"""`megatron-rl sft`: trainer ranks only."""

import time
from collections.abc import Sequence

from rich.console import Console

from megatron_rl.config.run import SftRunConfig
from megatron_rl.launch import preflight, run_dir, summary
from megatron_rl.launch.commands import rank_environments, run_environment, subcommand
from megatron_rl.launch.display import Display
from megatron_rl.launch.ports import free_ports
from megatron_rl.launch.processes import Supervisor


def main(config: SftRunConfig, command: Sequence[str], console: Console) -> None:
    """The whole run on this machine."""
    clock = summary.Clock()
    preflight.check(config)
    run = run_dir.open_run(config, config.run, config.resume, command)
    with Display(console, run.path) as display, Supervisor(run.logs, run_environment()) as supervisor:
        display.say(f"run directory {run.path}, attempt {run.attempt}; logs in {run.logs}")
        clock.add("setup", clock.started)
        started = time.monotonic()
        display.stage("sft", "sft_metrics.jsonl", config.sft.steps, run.resume_from.step if run.resume_from else 0)
        line = subcommand("trainer", run.resolved, "--kind", "sft", "--stage", "sft")
        ranks = rank_environments(config.trainer.parallel.world_size, free_ports(1)[0], config.trainer.threads)
        supervisor.wait(*[supervisor.start(f"trainer_{i}", line, environment) for i, environment in enumerate(ranks)], tick=display.tick)
        display.end_stage()
        clock.add("sft", started)
        display.say(f"done: {config.sft.steps} steps in {clock.wall:.1f} s; weights in {run.path}/hf/sft")
