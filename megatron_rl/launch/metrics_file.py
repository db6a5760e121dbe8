"""Reads metrics.jsonl: the trainer's step lines and the orchestrator's eval lines, also while they are being written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Tail:
    """The lines appended since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_lines(self) -> Iterator[Line]:
        """Whole lines only: a line still being written is left for the next look."""
        if not self.path.is_file():
            return
        with open(self.path, "rb") as f:
            f.seek(self._offset)
            for line in f:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


def read(path: Path) -> tuple[list[Line], list[Line]]:
    """(step lines, eval lines), each ascending by step; a step written again after a resume counts once, as written last."""
    steps: dict[int, Line] = {}
    evals: dict[int, Line] = {}
    for line in Tail(path).new_lines():
        (evals if is_eval(line) else steps).setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)], [evals[step] for step in sorted(evals)]


def is_eval(line: Line) -> bool:
    return any(key.startswith("eval/") for key in line)


def exact_match(line: Line) -> float | None:
    """Mean of eval/<name>/exact_match over the sources; None where there is none."""
    values = [value for key, value in line.items() if key.startswith("eval/") and key.endswith("/exact_match")]
    return sum(values) / len(values) if values else None
