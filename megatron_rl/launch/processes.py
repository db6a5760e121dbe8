"""Starts the processes of a run and watches them: one that dies unexpectedly ends the whole run, and is named."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.launch.process_groups import MARKER, Process, RunProcesses, processes
from megatron_rl.platform.parent_death import die_with_parent

GRACE_S = 10.0
TICK_S = 0.5
SETTLE_S = 3.0
INNER = re.compile(r"VLLM::|multiprocessing\.(spawn|forkserver)")
"""Titles of processes without which the child that started them is of no use."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PREFIX = re.compile(r"^\(\w+ pid=\d+\)\s*(?:[A-Z]+ \S+ \S+ \[[^\]]*\] ?)?")
"""What vLLM puts in front of the lines of its log."""
NAMED_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Failure)\b(?::|$)|^error: ")
ERROR_LEVEL = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b")
CONSEQUENCE = re.compile(r"EngineDeadError|Engine core initialization failed")
"""Errors that only say that something else failed before."""


class RunFailed(Exception):
    """A process died; the message is the one line for the console. `code` is the exit code of the whole run."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Child:
    """A process we started, in a session of its own, writing to its own log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    pidfd: int
    inner: dict[int, str] = field(default_factory=dict)
    """Living inner processes (pid -> title), as last seen."""
    lost: tuple[int, str, float] | None = None
    """The inner process that died first, and when."""

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.process.poll()
        if code is None:
            ended = "is of no use"
        elif code < 0:
            ended = f"was killed by {_signal_name(-code)}" + (
                " (from outside, or by the kernel: out of memory?)" if code == -signal.SIGKILL else ""
            )
        else:
            ended = f"ended with exit code {code}"
        inner = f" after its process {self.lost[1]} (pid {self.lost[0]}) died" if self.lost else ""
        return f"{self.name} (pid {self.process.pid}) {ended}{inner}"


class Supervisor:
    """Use as a context: whatever happens, nothing that it started outlives it.

    A watchdog process does the same should this one be killed. SIGTERM becomes KeyboardInterrupt. For the main thread: processes
    are tied to the thread that starts them.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None, grace_s: float = GRACE_S) -> None:
        """`grace_s`: between SIGTERM and SIGKILL; a child may outlive its inner processes for half of it."""
        self.logs, self.grace_s = logs, grace_s
        self.run = uuid.uuid4().hex
        self.environment = {**os.environ, **(environment or {}), MARKER: self.run, "PYTHONUNBUFFERED": "1"}
        self.children: list[Child] = []
        self.group = RunProcesses(self.run)
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Supervisor":
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.launch.watchdog", self.run], stdin=subprocess.PIPE, start_new_session=True
        )
        for sig in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, _interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        assert self._watchdog is not None and self._watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._watchdog.stdin.close()
        self._watchdog.wait()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Start one process; its output goes to `<logs>/<name>.log`."""
        log = self.logs / f"{name}.log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command,
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        child = Child(name, process, log, os.pidfd_open(process.pid))
        self.children.append(child)
        self.group.sessions.add(process.pid)
        self._tell_watchdog(str(process.pid))
        return child

    def wait(self, *ends: Child, tick: Callable[[], None] = lambda: None) -> None:
        """Until all of `ends` have ended well. RunFailed as soon as one of them, or any other child, ends in another way."""
        self.wait_until(lambda: not any(child in self.children for child in ends), *ends, tick=tick)

    def wait_until(self, condition: Callable[[], bool], *ends: Child, tick: Callable[[], None] = lambda: None) -> None:
        """Until `condition` holds; `ends` are the children that may end well meanwhile. `tick` is called about twice a second."""
        while not condition():
            self._poll(TICK_S)
            self._look_inside()
            dead = [child for child in self.children if child.process.poll() is not None]
            done = [child for child in dead if child in ends and child.process.returncode == 0]
            failed = [child for child in dead if child not in done]
            failed += [
                child for child in self.children if child.lost and child not in dead and time.monotonic() - child.lost[2] > self.grace_s / 2
            ]
            if failed:
                raise self._failure(self._first_cause(failed))
            for child in done:
                self._forget(child)
            self._tell_watchdog("")
            tick()

    def stop(self, *children: Child) -> None:
        """End these, and what they started, as planned."""
        for child in children:
            RunProcesses("-", {child.process.pid}).end(self.grace_s)
            child.process.wait()
            self._forget(child)

    def end(self) -> None:
        """End everything."""
        self.group.end(self.grace_s)
        for child in list(self.children):
            child.process.wait()
            self._forget(child)

    def _poll(self, seconds: float) -> None:
        poll = select.poll()
        for child in self.children:
            poll.register(child.pidfd, select.POLLIN)
        poll.poll(seconds * 1000)

    def _look_inside(self) -> None:
        """Notice inner processes of engines that died while their engine still lives.

        What counts is whether the pid lives: while a process renames itself, its title is none for a moment. And one with the
        title of its parent is a fork that has not become another program yet (vLLM looks for libraries so).
        """
        sessions = {child.process.pid: child for child in self.children if child.name.startswith("engine")}
        living: dict[int, dict[int, Process]] = {pid: {} for pid in sessions}
        for process in processes():
            if process.session in sessions:
                living[process.session][process.pid] = process
        for pid, child in sessions.items():
            gone = [inner for inner in child.inner if inner not in living[pid]]
            if gone and child.lost is None:
                child.lost = (gone[0], _short(child.inner[gone[0]]), time.monotonic())
            for inner, process in living[pid].items():
                parent = living[pid].get(process.parent)
                copied = parent is not None and parent.title == process.title
                if inner in child.inner or (inner != pid and INNER.search(process.title) and not copied):
                    child.inner[inner] = process.title
            for inner in gone:
                del child.inner[inner]

    def _first_cause(self, failed: list[Child]) -> Child:
        """Whose end most likely caused the others': one killed, or that lost an inner process; else the one started first (engines are).

        A process that notices a dead peer may end before the peer has, so what follows within SETTLE_S is looked at, too.
        """

        def struck(child: Child) -> bool:
            return child.process.returncode == -signal.SIGKILL or child.lost is not None

        deadline = time.monotonic() + SETTLE_S
        while not any(map(struck, failed)) and time.monotonic() < deadline:
            time.sleep(0.05)
            self._look_inside()
            failed = [child for child in self.children if child in failed or child.lost or child.process.poll() not in (None, 0)]
        return min(failed, key=lambda child: (not struck(child), self.children.index(child)))

    def _failure(self, child: Child) -> RunFailed:
        words = last_words(child.log)
        code = 2 if child.process.poll() == 2 else 1
        return RunFailed(f"{child.ending()}; log: {child.log}" + (f"; {words}" if words else ""), code)

    def _forget(self, child: Child) -> None:
        if child in self.children:
            self.children.remove(child)
            os.close(child.pidfd)

    def _tell_watchdog(self, line: str) -> None:
        """Add a session to what the watchdog would end; an empty line only asks whether it lives."""
        assert self._watchdog is not None and self._watchdog.stdin is not None, "Supervisor is used as a context"
        try:
            self._watchdog.stdin.write(line.encode() + b"\n")
            self._watchdog.stdin.flush()
        except BrokenPipeError:
            raise RunFailed(
                f"the watchdog (pid {self._watchdog.pid}) died; without it a killed launcher would leave processes behind"
            ) from None


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def last_words(log: Path, tail: int = 1 << 22, width: int = 300) -> str:
    """The last line of a log that is an error by its name, else by its level, as `last error: ...`.

    Where there is none (the process was killed, say), its last line, as `last line: ...`; "" for an empty log.
    """
    with open(log, "rb") as f:
        f.seek(max(0, log.stat().st_size - tail))
        lines = [line.rstrip() for line in COLOUR.sub("", f.read().decode(errors="replace")).splitlines() if line.strip()]
    named = [text for line in lines if NAMED_ERROR.search(text := PREFIX.sub("", line))]
    causes = [text for text in named if not CONSEQUENCE.search(text)]
    levelled = [line for line in lines if ERROR_LEVEL.search(line)]
    if errors := causes or named or levelled:
        return f"last error: {errors[-1].strip().removeprefix('error: ')[:width]}"
    return f"last line: {lines[-1].strip()[:width]}" if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _short(title: str) -> str:
    named = re.search(r"VLLM::\w+", title)
    return named.group() if named else "worker"
