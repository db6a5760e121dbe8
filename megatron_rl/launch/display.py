"""What the console shows of a run: a progress bar on a terminal, one line per step otherwise."""

import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_rl.launch.metrics_file import Line, Tail, exact_match, is_eval

SHOWN = (("reward", "reward/mean"), ("loss", "loss/total"), ("kl", "mismatch_kl/mean"))


class Display:
    """Use as a context; call `tick` often."""

    def __init__(self, console: Console, run_dir: Path) -> None:
        self.console = console
        self.run_dir = run_dir
        self._started = time.monotonic()
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._stage: _Stage | None = None

    def __enter__(self) -> "Display":
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_stage()
        self._bars.stop()

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        self.console.print(f"[{time.monotonic() - self._started:7.1f}s] {text}", highlight=False, markup=False, soft_wrap=True)

    def stage(self, name: str, file: str, steps: int, first: int = 0) -> None:
        """From now on, `tick` reports the lines that appear in `file`."""
        self.end_stage()
        tail = Tail(self.run_dir / file)
        list(tail.new_lines())  # earlier attempts
        self._stage = _Stage(
            name, tail, steps, time.monotonic(), first, self._bars.add_task(name, total=steps, completed=first, numbers="")
        )

    def end_stage(self) -> None:
        if self._stage is not None:
            self.tick()
            self._bars.stop_task(self._stage.task)
            self._stage = None

    def tick(self) -> None:
        stage = self._stage
        for line in stage.tail.new_lines() if stage else ():
            if is_eval(line):
                stage.accuracy = exact_match(line)
                shown = ", ".join(f"{key.removeprefix('eval/')} {value:.3g}" for key, value in line.items() if key.startswith("eval/"))
                self.say(f"eval after step {line['step']}: {shown}")
                continue
            numbers = stage.numbers(line)
            self._bars.update(stage.task, completed=line["step"], numbers=numbers)
            if not self.console.is_terminal:
                self.say(f"{stage.name} step {line['step']}/{stage.steps} {numbers}, eta {stage.eta(line['step'])}")


class _Stage:
    def __init__(self, name: str, tail: Tail, steps: int, started: float, first: int, task: TaskID) -> None:
        self.name, self.tail, self.steps, self.started, self.first, self.task = name, tail, steps, started, first, task
        self.accuracy: float | None = None

    def numbers(self, line: Line) -> str:
        shown = [f"{word} {line[key]:.4g}" for word, key in SHOWN if key in line]
        if self.accuracy is not None:
            shown.insert(1, f"accuracy {self.accuracy:.3f}")
        if line.get("time/step") and "tokens/trained" in line:
            shown.append(f"{line['tokens/trained'] / line['time/step']:.0f} tok/s")
        return ", ".join(shown)

    def eta(self, step: int) -> str:
        done = max(1, step - self.first)
        seconds = int((time.monotonic() - self.started) / done * (self.steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
