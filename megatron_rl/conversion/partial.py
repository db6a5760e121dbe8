"""A destination that is whole or not there: everything is written to DST.partial, whose journal lists the finished files, and renamed at
the end. A conversion that was cut short goes on from the journal."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import xxhash

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.extent import copy_bytes

JOURNAL = "conversion.jsonl"
Checksum = Literal["xxh3", "sha256"]
"""Of finished files: xxh3 is as fast as the disk, sha256 is what Megatron's integrity.json wants."""
_STATES = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}


class Partial:
    """DST.partial, open for writing.

    `identity` says what is converted from what; a partial destination of anything else is not continued.

    Raises:
        ConfigError: `destination` exists, or a partial one that `resume` does not fit.
    """

    def __init__(self, destination: Path, identity: dict[str, Any], resume: bool, checksum: Checksum = "xxh3") -> None:
        self.destination = destination
        self.path = destination.with_name(destination.name + ".partial")
        self._identity, self.checksum = identity, checksum
        self._finisher = ThreadPoolExecutor(1)
        self._open: dict[str, HashedFile] = {}
        self._pending: Future[None] | None = None
        self.finished: dict[str, dict[str, Any]] = {}
        """By file name: {"bytes", checksum, "note"} of every file that is whole and on the disk."""
        if os.path.lexists(destination):
            raise ConfigError(f"{destination} exists; delete it, or give another destination")
        if self.path.exists():
            if not resume:
                raise ConfigError(f"{self.path} is left of a conversion that was cut short; continue it with --resume, or delete it")
            self._read_journal()
        else:
            try:
                self.path.mkdir(parents=True)
            except OSError as error:
                raise ConfigError(f"{self.path}: {error.strerror}; give a destination that can be written") from None
            self._append({"identity": identity})

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What the disk refuses, as a ConfigError; what is finished stays for --resume."""
        try:
            yield
            self._wait()
        except OSError as error:
            self._finisher.shutdown(cancel_futures=True)
            raise ConfigError(
                f"{error.filename or self.path}: {error.strerror}; the finished part is kept: continue with --resume, or delete {self.path}"
            ) from None

    def create(self, file: str) -> "HashedFile":
        """Open `file` (its folder appears if need be) for writing, up to `finish`."""
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open[file] = HashedFile(path, self.checksum)
        return self._open[file]

    def finish(self, file: str, note: Any = None) -> None:
        """`file` is written: bring it to the disk and note it, while the next one is being written."""
        self._wait()
        self._pending = self._finisher.submit(self._finish, file, self._open.pop(file), note)

    def checksums(self, besides: str) -> dict[str, str]:
        """Of the finished files `besides` the one that lists them (a kill after it was written leaves it among them), once all are on the
        disk."""
        self._wait()
        return {file: entry[self.checksum] for file, entry in self.finished.items() if file != besides}

    def complete(self) -> None:
        """Everything is written: let the destination appear."""
        self._wait()
        for path in (self.path, *self.path.rglob("*")):
            if str(path.relative_to(self.path)) not in self.finished:
                _fsync(path)
        os.rename(self.path, self.destination)
        (self.destination / JOURNAL).unlink()
        _fsync(self.destination.parent)
        self._finisher.shutdown()

    def write_text(self, file: str, text: str) -> None:
        """A small file, finished at once."""
        self.create(file).write(text.encode())
        self.finish(file)
        self._wait()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _finish(self, file: str, written: "HashedFile", note: Any) -> None:
        written.close()
        entry = {"bytes": written.size, self.checksum: written.hexdigest(), "note": note}
        self._append({"file": file, **entry})
        self.finished[file] = entry

    def _append(self, line: dict[str, Any]) -> None:
        with (self.path / JOURNAL).open("a") as journal:
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

    def _read_journal(self) -> None:
        """Keep what is finished and unharmed, delete the rest."""
        try:
            text = (self.path / JOURNAL).read_text()
            # A line that a kill cut short has no end.
            first, *lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        except (OSError, ValueError):
            raise ConfigError(f"{self.path} has no {JOURNAL} that could be read; delete the directory and start afresh") from None
        if first != {"identity": json.loads(json.dumps(self._identity))}:
            raise ConfigError(
                f"{self.path} is of another conversion (the source, its files or the layout differ); delete it, or finish that one"
            )
        for line in lines:
            path = self.path / line.pop("file")
            if path.is_file() and path.stat().st_size == line["bytes"] and digest(path, self.checksum) == line[self.checksum]:
                self.finished[str(path.relative_to(self.path))] = line
        for path in self.path.rglob("*"):
            if path.is_file() and path.name != JOURNAL and str(path.relative_to(self.path)) not in self.finished:
                path.unlink()
        (self.path / JOURNAL).unlink()
        self._append(first)
        for file, entry in self.finished.items():
            self._append({"file": file, **entry})


class HashedFile:
    """A file being written, and summed up on the way."""

    def __init__(self, path: Path, checksum: Checksum) -> None:
        self.size = 0
        self._file = path.open("wb")
        self._state = _STATES[checksum]()

    def write(self, data: Any) -> int:
        self._state.update(data)
        written = self._file.write(data)
        self.size += written
        return written

    def tell(self) -> int:
        return self.size

    def hexdigest(self) -> str:
        return self._state.hexdigest()

    def close(self) -> None:
        """On the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def digest(path: Path, checksum: Checksum) -> str:
    state = _STATES[checksum]()
    copy_bytes(path, 0, path.stat().st_size, state.update)
    return state.hexdigest()


def check_paths(source: Path, destination: Path) -> None:
    """ConfigError unless the two are apart and the source is there."""
    if not source.is_dir():
        raise ConfigError(f"{source} is not a directory")
    if destination.name in ("", ".."):
        raise ConfigError(f"{destination}: the destination must be a new directory's own name")
    if source.resolve() == destination.resolve():
        raise ConfigError(f"{source}: source and destination are the same directory")
    if source.resolve() in destination.resolve().parents:
        raise ConfigError(f"{destination}: the destination lies inside the source")


def check_space(destination: Path, nbytes: int) -> None:
    """ConfigError unless `nbytes` fit on the disk, counting what a partial destination has of them."""
    partial = destination.with_name(destination.name + ".partial")
    there = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    disk = next(parent for parent in destination.resolve().parents if parent.is_dir())
    if (free := shutil.disk_usage(disk).free) < nbytes - there:
        raise ConfigError(f"{destination}: needs {(nbytes - there) / 1e9:.2f} GB, {disk} has {free / 1e9:.2f} GB left; make room")


def fingerprint(directory: Path) -> list[list[Any]]:
    """Name, size and time of every file of a directory: when they are the same, so is the source."""
    stats = ((path, path.stat()) for path in sorted(directory.rglob("*")) if path.is_file())
    return [[str(path.relative_to(directory)), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
