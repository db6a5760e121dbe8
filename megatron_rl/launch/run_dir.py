"""The run directory: attempts, the guard against overwriting, --clean, --resume and forks.

runs/<name>/ configs/attempt_<n>/{command.txt,resolved.json} configs/latest  logs/attempt_<n>/<process>.log  logs/latest
             checkpoints/step_<n>/{trainer,orchestrator,COMPLETE}  weights/<version>/  batches/  traces/
             metrics.jsonl  summary.json  plots/  hf/step_<n>/
"""

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import EvalRunConfig, ResumeConfig, RLConfig, RunConfig, SftRunConfig
from megatron_rl.transports.atomic import write_atomic

DIRECTORIES = ("configs", "logs", "checkpoints", "weights", "batches", "exchange", "traces", "plots", "hf", "eval")
OWNED = (*DIRECTORIES, "metrics.jsonl", "sft_metrics.jsonl", "summary.json")
"""What a run writes, and all that --clean deletes."""
LOCK = ".lock"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int


@dataclass(frozen=True)
class RunDir:
    """An opened run directory: this process holds its lock until it ends."""

    path: Path
    attempt: int
    resume_from: Checkpoint | None
    lock: IO[str]

    @property
    def resolved(self) -> Path:
        """The resolved config of this attempt, which every process of the run reads."""
        return self.path / "configs" / f"attempt_{self.attempt}" / "resolved.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt}"


def complete_checkpoints(path: Path) -> list[Checkpoint]:
    """Ascending by step. `path` is a run directory, its checkpoints/, or one checkpoint; without COMPLETE none counts."""
    if (path / "COMPLETE").is_file():
        candidates = [path]
    else:
        candidates = [marker.parent for pattern in ("checkpoints/step_*/COMPLETE", "step_*/COMPLETE") for marker in path.glob(pattern)]
    found = [Checkpoint(c, int(n)) for c in candidates if (n := c.name.removeprefix("step_")).isdigit()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def is_own(run: RunConfig, resume: ResumeConfig) -> bool:
    """Whether a resume goes on in its own directory; False for a fork of another run."""
    if resume.dir is None:
        return True
    source = Path(resume.dir).resolve()
    return Path(run.dir).resolve() in (source, *source.parents)


def start_checkpoint(run: RunConfig, resume: ResumeConfig) -> Checkpoint | None:
    """The checkpoint that training goes on from; None for a fresh start. ConfigError: asked for, and there is none."""
    if not resume.enabled:
        return None
    where = Path(resume.dir or run.dir)
    found = complete_checkpoints(where)
    if not found:
        raise ConfigError(f"resume: {where} has no complete checkpoint (checkpoints/step_<n>/COMPLETE); start afresh with --clean")
    return found[-1]


def used(path: Path) -> bool:
    return any((path / name).exists() for name in OWNED)


def problems(run: RunConfig, resume: ResumeConfig) -> list[str]:
    """Why this run directory can't be used as asked. Reads only."""
    path = Path(run.dir)
    if blocked := _no_directory(path):
        return [f"run.root: {blocked}; give another run.root or run.name"]
    found = []
    own = is_own(run, resume)
    holder = lock_holder(path)
    if holder:
        found.append(f"run.name: {path} is in use by a running megatron-rl (pid {holder}); wait for it, or give another run.name")
    if resume.enabled and run.clean:
        found.append("--resume and --clean contradict each other; give one")
    if resume.dir is not None and not Path(resume.dir).is_dir():
        found.append(f"resume.dir: {resume.dir} is not a directory")
    elif resume.enabled and not complete_checkpoints(path if own else Path(resume.dir or "")):
        where = path if own else resume.dir
        found.append(f"resume: {where} has no complete checkpoint (checkpoints/step_<n>/COMPLETE); start afresh with --clean")
    if used(path):
        if not (path / "configs").is_dir():
            found.append(f"run.root: {path} exists and is not a run directory; give another run.root or run.name")
        elif not run.clean and not (resume.enabled and own):
            what = "it can't be forked into" if resume.enabled else "go on with --resume, start afresh with --clean"
            found.append(f"run.name: {path} holds an earlier run; {what}, or give another run.name")
    return found


def _no_directory(path: Path) -> str | None:
    """Why `path` neither is a directory nor can become one; None when it can."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _no_directory(path.parent)
    except OSError as error:  # a name that is too long, a directory that may not be read
        return f"{path}: {error.strerror}"
    return None if path.is_dir() else f"{path} is {'a symbolic link to nowhere' if path.is_symlink() else 'a file'}"


def open_run(config: RLConfig | SftRunConfig | EvalRunConfig, run: RunConfig, resume: ResumeConfig, command: Sequence[str]) -> RunDir:
    """Take the directory for this process: clean or roll back as asked, make a new attempt, write what it runs with.

    In resolved.json `resume.dir` is the very checkpoint to go on from, and `run.clean` is off: whoever runs it again must ask again.
    """
    found = problems(run, resume)
    if found:
        raise ConfigError(*found)
    path = Path(run.dir)
    path.mkdir(parents=True, exist_ok=True)
    lock = _lock(path)
    if run.clean:
        for name in OWNED:
            _delete(path / name)
    config = config.model_copy(update={"run": run.model_copy(update={"clean": False})})
    start = start_checkpoint(run, resume)
    if start is not None:
        # every process of this attempt must find this one, also when a later one exists by then
        config = config.model_copy(update={"resume": ResumeConfig(enabled=True, dir=str(start.path))})
        if used(path):
            roll_back(path, start.step, "sft_metrics.jsonl" if isinstance(config, SftRunConfig) else "metrics.jsonl")
    attempt = 1 + max((int(old.name.removeprefix("attempt_")) for old in path.glob("configs/attempt_*")), default=0)
    opened = RunDir(path, attempt, start, lock)
    for parent in (opened.resolved.parent, opened.logs):
        parent.mkdir(parents=True)
        latest = parent.parent / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(parent.name)
    (opened.resolved.parent / "command.txt").write_text(shlex.join(command) + "\n")
    write_atomic(opened.resolved, json.dumps(config.model_dump(mode="json"), indent=2).encode() + b"\n")
    return opened


def roll_back(path: Path, step: int, metrics_file: str) -> None:
    """Forget what was made after `step`: its steps are made again. Old weight versions go too, the trainer offers its own.

    `metrics_file` has the lines of the stage that is resumed; those of a warm-up before it stay.
    """
    for entry in [*path.glob("batches/step_*"), *path.glob("checkpoints/step_*")]:
        number = entry.name.removeprefix("step_").removesuffix(".batch")
        if not number.isdigit() or int(number) > step:  # not a number: a save that was cut short
            _delete(entry)
    for directory in ("weights", "exchange"):
        _delete(path / directory)
    metrics = path / metrics_file
    if metrics.is_file():
        kept = [line for line in metrics.read_text().splitlines() if _step_of(line) <= step]
        write_atomic(metrics, "".join(line + "\n" for line in kept).encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line that a kill cut short
        return float("inf")


def lock_holder(path: Path) -> str | None:
    """The pid that holds the directory's lock; None when it is free."""
    try:
        with open(path / LOCK) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "?"
    except FileNotFoundError:
        pass
    return None


def _lock(path: Path) -> IO[str]:
    lock = open(path / LOCK, "a+")  # noqa: SIM115  held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"run.name: {path} was taken by another megatron-rl just now; give another run.name") from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        (path / "COMPLETE").unlink(missing_ok=True)  # first: a checkpoint half deleted must not count
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
