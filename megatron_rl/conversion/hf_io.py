"""HF directories of safetensors: reading by slices, writing tensor by tensor."""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import INDEX, WEIGHTS
from megatron_rl.conversion.extent import Extent

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""What the trainer holds, and safetensors' names for it."""
TYPES = {name: dtype for dtype, name in DTYPES.items()}
_STORED = {**DTYPES, torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}
"""What is written: quantised weights and their scales too."""


class CheckpointReader:
    """Tensors of an HF directory: one model.safetensors, or shards with an index.

    Raises:
        ConfigError: one line that names the file, and the tensor where there is one.
    """

    def __init__(self, hf_dir: str | Path) -> None:
        self.directory = Path(hf_dir)
        self._open: dict[str, safe_open] = {}
        self._headers: dict[Path, tuple[dict, int]] = {}
        index = self.directory / INDEX
        if index.exists():
            try:
                self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError):
                raise ConfigError(f"{index}: not an index of safetensors shards (no weight_map)") from None
        elif (self.directory / WEIGHTS).exists():
            self.files = dict.fromkeys(self._shard(WEIGHTS).keys(), WEIGHTS)
        else:
            raise ConfigError(f"{self.directory}: no {WEIGHTS} and no {INDEX}; save the model with safetensors")

    def _shard(self, file: str) -> safe_open:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise ConfigError(f"{path}: missing, though {INDEX} lists it") from None
            except SafetensorError as error:
                raise ConfigError(f"{path}: damaged: {error}") from None
        return self._open[file]

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self, file: str) -> list[str]:
        """Tensors that a file holds, whatever the index says."""
        return list(self._shard(file).keys())

    def dtype(self, name: str) -> str:
        """Type of a tensor that is there, in safetensors' words."""
        return self._shard(self.files[name]).get_slice(name).get_dtype()

    def extent(self, name: str, part: tuple[slice, ...], shape: tuple[int, ...]) -> Extent | None:
        """Where the bytes of a part of a tensor lie, called a tensor of this `shape`; None where they do not lie together."""
        path = self.directory / self.files[name]
        if path not in self._headers:
            self._headers[path] = read_header(path)
        entries, data = self._headers[path]
        entry = entries[name]
        if any(cut != slice(0, length) for cut, length in zip(part[1:], entry["shape"][1:], strict=True)):
            return None
        dtype = TYPES[entry["dtype"]]
        row = torch.Size(entry["shape"][1:]).numel() * dtype.itemsize
        return Extent(path, data + entry["data_offsets"][0] + part[0].start * row, shape, dtype)

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        """`part` of the tensor, which must have `shape` in the file."""
        if name not in self.files:
            raise ConfigError(f"{self.directory}: tensor {name} is missing")
        path = self.directory / self.files[name]
        try:
            tensor = self._shard(self.files[name]).get_slice(name)
            found = tuple(tensor.get_shape())
            if found != shape:
                raise ConfigError(f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
            return tensor[part]
        except SafetensorError as error:
            raise ConfigError(f"{path}: tensor {name}: {error}") from None


def read_header(file: Path) -> tuple[dict[str, dict], int]:
    """Entries of a safetensors file that is known to be whole, by tensor, and where its data begins."""
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        entries = json.loads(f.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def header_bytes(entries: dict[str, dict]) -> bytes:
    """What a safetensors file of these entries begins with; their data follows."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class BinaryFile(Protocol):
    """What a shard is written to."""

    def write(self, data: Any, /) -> int: ...


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and type of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class ShardWriter:
    """One safetensors file, written tensor by tensor in the announced order; only one tensor is in memory at a time."""

    def __init__(self, path: Path, tensors: list[TensorSpec], file: BinaryFile | None = None) -> None:
        """`file`: already open, and then left open."""
        self.path = path
        self._expected = list(reversed(tensors))
        entries: dict[str, dict] = {}
        offset = 0
        for tensor in tensors:
            span = [offset, offset + tensor.nbytes]
            entries[tensor.name] = {"dtype": _STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
            offset += tensor.nbytes
        self._close = file is None
        self._file = file or path.open("wb")
        self._file.write(header_bytes(entries))

    def write(self, name: str, tensor: Tensor | Extent) -> None:
        """The next tensor."""
        expected = self._expected.pop()
        if (name, tuple(tensor.shape), tensor.dtype) != (expected.name, expected.shape, expected.dtype):
            raise ValueError(f"{self.path}: expected {expected}, got {name} {tuple(tensor.shape)} {tensor.dtype}")
        if isinstance(tensor, Extent):
            tensor.copy_to(self._file.write)
        else:
            self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self._expected:
            raise ValueError(f"{self.path}: {len(self._expected)} announced tensors were not written, first {self._expected[-1].name}")
        if self._close:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
