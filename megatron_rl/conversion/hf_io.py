"""HF directories of safetensors: reading by slices, writing tensor by tensor."""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import INDEX, WEIGHTS

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""What the trainer holds, and safetensors' names for it."""
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


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and type of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plan_shards(stages: Iterable[Iterable[TensorSpec]], max_bytes: int) -> list[list[list[TensorSpec]]]:
    """Cut each stage's tensors into shards of at most `max_bytes` (or one tensor): stage -> shard -> tensors, order kept."""
    plan = []
    for tensors in stages:
        shards, room = [], 0
        for tensor in tensors:
            if not shards or tensor.nbytes > room:
                shards.append([])
                room = max_bytes
            shards[-1].append(tensor)
            room -= tensor.nbytes
        plan.append(shards)
    return plan


class ShardWriter:
    """One safetensors file, written tensor by tensor in the announced order; only one tensor is in memory at a time."""

    def __init__(self, path: Path, tensors: list[TensorSpec]) -> None:
        self.path = path
        self._expected = list(reversed(tensors))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            span = [offset, offset + tensor.nbytes]
            header[tensor.name] = {"dtype": _STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
            offset += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor."""
        expected = self._expected.pop()
        if (name, tuple(tensor.shape), tensor.dtype) != (expected.name, expected.shape, expected.dtype):
            raise ValueError(f"{self.path}: expected {expected}, got {name} {tuple(tensor.shape)} {tensor.dtype}")
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self._expected:
            raise ValueError(f"{self.path}: {len(self._expected)} announced tensors were not written, first {self._expected[-1].name}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
