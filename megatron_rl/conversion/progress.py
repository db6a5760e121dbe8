"""How far a conversion is: a bar with GB/s on a terminal, a line every few seconds otherwise, nothing where it takes two."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_QUIET_S, _BAR_S, _LINE_S = 2.0, 0.1, 5.0


class ByteProgress:
    """Use as a context."""

    def __init__(self, title: str, total: int, console: Console) -> None:
        self.title, self.total, self.console = title, total, console
        self.done = self.skipped = 0
        self._started = time.monotonic()
        self._next = self._started + _QUIET_S
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task(title, total=total)

    def advance(self, nbytes: int, resumed: bool = False) -> None:
        """`nbytes` more are through, or were so before."""
        self.done += nbytes
        self.skipped += nbytes if resumed else 0
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_BAR_S if self.console.is_terminal else _LINE_S)
        if self.console.is_terminal:
            self._bar.start()
            self._bar.update(self._task, completed=self.done)
        else:
            self.say(f"{self.title}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {self._rate()}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _rate(self) -> str:
        return f"{(self.done - self.skipped) / 1e9 / max(1e-9, time.monotonic() - self._started):.2f} GB/s"

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._bar.stop()
        if kind is None:
            resumed = f", {self.skipped / 1e9:.2f} GB of it done before" if self.skipped else ""
            self.say(f"{self.title}: {self.done / 1e9:.2f} GB in {time.monotonic() - self._started:.1f} s ({self._rate()}){resumed}")
