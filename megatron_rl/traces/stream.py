"""The trace stream: one JSON line per rollout, appended once what became of it is known."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.traces.records import Rollout


class TraceStream:
    """Appends to `traces/stream.jsonl` of a run. A line that an earlier crash left torn is cut off on opening.

    A row is a Rollout's fields and: kind ("train" or "eval"), step (of the batch it was made for; the version evaluated),
    fate ("shipped", or why it was not), and what the caller adds. Ids are those of the run, not of the attempt: a rollout
    that a resumed run made again is there twice, and the later row counts.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        os.ftruncate(self._file, _whole_bytes(path))

    def append(self, rollout: Rollout, *, kind: str, step: int, fate: str, **more: Any) -> None:
        row = {"kind": kind, "step": step, "fate": fate, **more, **rollout.to_json()}
        os.write(self._file, json.dumps(row, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Rows in order; a torn last line is left out. ValueError names the file and line of one that is no JSON."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not a JSON line: {error}") from error


def _whole_bytes(path: Path) -> int:
    """Size of the file up to its last newline."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
