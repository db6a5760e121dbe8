"""`megatron-rl rl` on one machine: engines at once, the warm-up while they start, then trainer ranks and orchestrator."""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_rl.config.run import RLConfig
from megatron_rl.launch import plots, preflight, run_dir, summary
from megatron_rl.launch.commands import TOKEN, rank_environments, run_environment, subcommand
from megatron_rl.launch.display import Display
from megatron_rl.launch.engines import Engines
from megatron_rl.launch.ports import free_ports
from megatron_rl.launch.processes import Child, Supervisor
from megatron_rl.launch.run_dir import RunDir


def main(config: RLConfig, command: Sequence[str], console: Console) -> None:
    """The whole run. ConfigError before anything starts, RunFailed when a process dies."""
    clock = summary.Clock()
    with console.status("checking the config"):
        preflight.check(config)
    run = run_dir.open_run(config, config.run, config.resume, command)
    environment = {TOKEN: secrets.token_hex(16), **run_environment()}
    with Display(console, run.path) as display, Supervisor(run.logs, environment) as supervisor:
        display.say(f"run directory {run.path}, attempt {run.attempt}; logs in {run.logs}")
        services = None if config.trainer.replay else Services(config, run.resolved, supervisor, display, clock)
        clock.add("setup", clock.started)
        if config.warms_up:
            train(config, run, supervisor, display, clock, "sft", services)
        if services:
            zmq = config.orchestrator.batch_transport == "zmq"
            batches = f"tcp://127.0.0.1:{free_ports(1)[0]}" if zmq else str(run.path / "exchange")
            services.start_orchestrator(batches)
            train(config, run, supervisor, display, clock, "rl", services, batches)
        else:
            train(config, run, supervisor, display, clock, "rl", services)
    finish(run.path, clock, display)


class Services(Engines):
    """The engines and the orchestrator: all of a run that is not a trainer rank."""

    orchestrator: Child | None = None

    def start_orchestrator(self, batches: str) -> Child:
        """It serves batches at the address `batches`."""
        engines = [word for url in self.urls for word in ("--engine", url)]
        line = subcommand("orchestrator", self.resolved, *engines, "--batches", batches)
        self.orchestrator = self.supervisor.start("orchestrator", line)
        return self.orchestrator


def train(
    config: RLConfig,
    run: RunDir,
    supervisor: Supervisor,
    display: Display,
    clock: summary.Clock,
    stage: str,
    services: Services | None,
    batches: str | None = None,
) -> None:
    """Run the trainer ranks of one stage to their end; of the rl stage, the orchestrator too."""
    started = time.monotonic()
    if stage == "sft":
        assert config.sft is not None
        display.stage("sft", "sft_metrics.jsonl", config.sft.steps)
    else:
        display.stage("rl", "metrics.jsonl", config.trainer.steps, run.resume_from.step if run.resume_from else 0)
    command = subcommand("trainer", run.resolved, "--stage", stage, *(["--batches", batches] if batches else []))
    prefix = "trainer" if stage == "rl" else "sft"
    ends = [
        supervisor.start(f"{prefix}_{rank}", command, environment)
        for rank, environment in enumerate(rank_environments(config.trainer.parallel.world_size, free_ports(1)[0], config.trainer.threads))
    ]
    display.say(f"{stage}: {len(ends)} trainer rank(s)")
    if services is not None and services.orchestrator is not None:
        ends.append(services.orchestrator)

    def tick() -> None:
        display.tick()
        if services is not None:
            services.tick()

    supervisor.wait(*ends, tick=tick)
    display.end_stage()
    clock.add(stage, started)


def finish(path: Path, clock: summary.Clock, display: Display) -> None:
    """summary.json, the plots, and the last lines on the console."""
    result = summary.write(path, clock)
    drawn = plots.draw(path)
    if "eval_before" in result:
        display.say(f"held-out exact match {result['eval_before']:.3f} -> {result['eval_after']:.3f}")
    display.say("phases: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in result["phases"].items()))
    display.say(
        f"done: {result['steps']} steps in {result['wall_seconds']:.1f} s; summary {path}/summary.json"
        + (f", plots {path}/plots" if drawn else "")
    )
