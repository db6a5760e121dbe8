"""The processes of a run, also those that its children started: finding them all and ending them all."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MARKER = "MEGATRON_RL_RUN"
"""Environment variable that every process of a run inherits."""


@dataclass(frozen=True)
class Process:
    """One living process."""

    pid: int
    parent: int
    session: int
    title: str


@dataclass
class RunProcesses:
    """All processes of one run: those of the sessions it started, and those that carry its marker.

    Neither alone is enough: a process can leave its session, and one that sets its title overwrites its environment block.
    """

    run: str
    sessions: set[int] = field(default_factory=set)

    def living(self) -> list[Process]:
        """Without zombies, and without the caller."""
        marker = f"{MARKER}={self.run}".encode()
        return [p for p in processes() if p.pid != os.getpid() and (p.session in self.sessions or marker in _environment(p.pid))]

    def end(self, grace_s: float) -> None:
        """SIGTERM to all of them, then, after `grace_s` at most, SIGKILL to what is left."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.1)
        while self._signal(signal.SIGKILL):  # again for what was started meanwhile
            time.sleep(0.05)

    def _signal(self, sig: int) -> int:
        found = self.living()
        for process in found:
            try:
                os.kill(process.pid, sig)
            except ProcessLookupError:
                continue
        return len(found)


def processes() -> Iterator[Process]:
    """Every living process on this machine that we may look at."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    title = (entry / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
                    yield Process(int(entry.name), int(parent), int(session), title)
            except OSError:  # it ended meanwhile
                continue


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or belongs to another user
        return []
