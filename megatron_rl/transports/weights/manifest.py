"""The manifest of a policy version: which tensors it has, in which order, with which checksums, in which files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.transports.weights.base import WeightTransferError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. `shape` and `dtype` (torch's name, "bfloat16") as sent; `xxh3` over its bytes in C order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    xxh3: str
    file: str

    @staticmethod
    def from_row(row: dict[str, Any]) -> "TensorEntry":
        """Of what `asdict` and JSON made of one. TypeError or KeyError for anything else."""
        return TensorEntry(**{**row, "shape": tuple(row["shape"])})

    @property
    def layout(self) -> tuple[tuple[int, ...], str]:
        """What may not change between versions of one policy."""
        return self.shape, self.dtype


@dataclass(frozen=True)
class Manifest:
    """All tensors of one version, in the order they were sent. kind "full": nothing of the model is left out."""

    version: int
    tensors: tuple[TensorEntry, ...]
    kind: Literal["full"] = "full"

    @property
    def files(self) -> list[str]:
        """File names in order of first use, relative to the version's directory."""
        return list(dict.fromkeys(entry.file for entry in self.tensors))

    def to_json(self) -> str:
        rows = ",\n".join(json.dumps(asdict(entry)) for entry in self.tensors)
        return f'{{"format": {FORMAT}, "version": {self.version}, "kind": "{self.kind}", "tensors": [\n{rows}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Raises WeightTransferError on anything but a manifest that to_json wrote."""
        try:
            return _parse(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise WeightTransferError(f"not a weight manifest: {type(error).__name__}: {error}") from error

    @staticmethod
    def read(directory: Path) -> "Manifest":
        """The manifest of the version in `directory`. Raises WeightTransferError naming the file."""
        path = directory / MANIFEST
        try:
            return Manifest.from_json(path.read_text())
        except (OSError, WeightTransferError) as error:
            raise WeightTransferError(f"{path}: {error}") from error


def _parse(data: dict[str, Any]) -> Manifest:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}, this build reads {FORMAT}")
    if data["kind"] != "full":
        raise ValueError(f"kind {data['kind']!r}, this build applies only 'full'")
    if type(data["version"]) is not int or data["version"] < 0:
        raise ValueError(f"version {data['version']!r} is not a whole number >= 0")
    entries = tuple(map(TensorEntry.from_row, data["tensors"]))
    names = [entry.name for entry in entries]
    if duplicates := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
        raise ValueError(f"tensors listed twice: {', '.join(duplicates)}")
    if outside := [entry.file for entry in entries if Path(entry.file).name != entry.file]:
        raise ValueError(f"file {outside[0]!r} is not a plain name")
    return Manifest(version=data["version"], tensors=entries)
