"""The process beside trainer rank 0 under torchrun: engines, orchestrator, progress, summary.

`python -m megatron_rl.launch.services RESOLVED.json BATCHES`; standard input says "rl" when the rl stage begins and "done" when the
trainer has ended well. Its end before that is rank 0's death.
"""

import os
import select
import sys
import time
from pathlib import Path

from rich.console import Console

from megatron_rl.config.load import load
from megatron_rl.config.run import RLConfig
from megatron_rl.launch import summary
from megatron_rl.launch.display import Display
from megatron_rl.launch.exit_codes import run_process
from megatron_rl.launch.local import Services, finish
from megatron_rl.launch.processes import RunFailed, Supervisor
from megatron_rl.launch.run_dir import start_checkpoint


class Rank0:
    """What rank 0 has said so far."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.words: set[str] = set()

    def listen(self) -> None:
        """RunFailed when rank 0 has died."""
        while select.select([0], [], [], 0)[0]:
            heard = os.read(0, 64)
            if not heard:
                if "done" in self.words:
                    return
                raise RunFailed(f"a trainer rank ended before its last step: {self._why()}")
            self.words.update(heard.decode().split())

    def _why(self) -> str:
        """torchrun ends all ranks when one fails; the one that failed has said so in its log."""
        for log in sorted(self.logs.glob("trainer_*.log")):
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
            if lines:
                return f"{log.stem}: {lines[-1].removeprefix('error: ')}; log: {log}"
        return f"it was killed, torchrun names it; logs: {self.logs}"


def main(resolved: Path, batches: str) -> None:
    config = load(RLConfig, ["--config", str(resolved)]).config
    logs = resolved.parent.parent.parent / "logs" / resolved.parent.name
    path = Path(config.run.dir)
    clock, rank0 = summary.Clock(), Rank0(logs)
    checkpoint = start_checkpoint(config.run, config.resume)
    with Display(Console(), path) as display, Supervisor(logs) as supervisor:
        services = Services(config, resolved, supervisor, display, clock)
        clock.add("setup", clock.started)

        def tick() -> None:
            rank0.listen()
            display.tick()
            services.tick()

        started = time.monotonic()
        if config.warms_up:
            assert config.sft is not None
            display.stage("sft", "sft_metrics.jsonl", config.sft.steps)
        supervisor.wait_until(lambda: "rl" in rank0.words, tick=tick)
        if config.warms_up:
            clock.add("sft", started)
        started = time.monotonic()
        display.stage("rl", "metrics.jsonl", config.trainer.steps, checkpoint.step if checkpoint else 0)
        orchestrator = services.start_orchestrator(batches)
        supervisor.wait_until(lambda: "done" in rank0.words and orchestrator not in supervisor.children, orchestrator, tick=tick)
        clock.add("rl", started)
        display.end_stage()
    finish(path, clock, display)


if __name__ == "__main__":
    sys.exit(run_process(lambda: main(Path(sys.argv[1]), sys.argv[2])))
