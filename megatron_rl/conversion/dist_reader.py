"""A torch_dist checkpoint (what megatron.core.dist_checkpointing writes) read region by region, without ranks and without the model."""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.checkpoint_layout import Region
from megatron_rl.conversion.extent import Extent, Window, in_archive
from megatron_rl.conversion.metadata import read_metadata


class DistReader:
    """Tensors (global, by key) and objects (opaque bytes, by key) of a checkpoint.

    Raises:
        ConfigError: one line that names the file and the key.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        metadata = read_metadata(directory)
        self._storage = metadata.storage_data
        stored = metadata.state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {k: v for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
        self.objects: list[str] = [k for k, v in stored.items() if isinstance(v, BytesStorageMetadata)]
        self._chunks: dict[str, dict[Region, torch.Size]] = {}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def regions(self, key: str) -> list[Region]:
        """The chunks in which a tensor is stored."""
        return list(self._chunks_of(key))

    def nbytes(self, key: str) -> int:
        return self.tensors[key].size.numel() * self.dtype(key).itemsize

    def read(self, key: str, region: Region) -> Tensor:
        """A region of a tensor; a region that is stored as one chunk is not copied."""
        chunks = self._chunks_of(key)
        if region in chunks:
            return self._load(key, chunks[region], region.sizes)
        whole = torch.empty(region.sizes, dtype=self.dtype(key))
        filled = 0
        for chunk, index in chunks.items():
            if (common := region.intersection(chunk)) is None:
                continue
            part = self._load(key, index, chunk.sizes)[common.within(chunk)]
            whole[common.within(region)] = part
            filled += part.numel()
        if filled != whole.numel():
            raise ConfigError(f"{self.directory}: {key}: {whole.numel() - filled} of {whole.numel()} elements are not there")
        return whole

    def extent(self, key: str, region: Region) -> Extent | None:
        """Where the bytes of a region lie, if it is stored as one chunk in plain order."""
        if (offsets := self._chunks_of(key).get(region)) is None:
            return None
        info = self._info(MetadataIndex(key, offsets))
        return in_archive(self.directory / info.relative_path, info.offset, info.length, region.sizes, self.dtype(key))

    def read_object(self, key: str) -> bytes:
        """The bytes of an object, as they are."""
        return self._slice(MetadataIndex(key))

    def _chunks_of(self, key: str) -> dict[Region, torch.Size]:
        if key not in self._chunks:
            self._chunks[key] = {Region(tuple(c.offsets), tuple(c.sizes)): c.offsets for c in self.tensors[key].chunks}
        return self._chunks[key]

    def _load(self, key: str, offsets: torch.Size, sizes: tuple[int, ...]) -> Tensor:
        info = self._info(MetadataIndex(key, offsets))
        path = self.directory / info.relative_path
        with path.open("rb") as file:
            view = Window(file, info.offset, info.length)
            try:
                tensor = torch.load(view, map_location="cpu", weights_only=True)
            except Exception as error:  # whatever torch's reader meets in damaged bytes
                raise ConfigError(f"{path}: {key}: damaged: {type(error).__name__}: {str(error).splitlines()[0]}") from None
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes or tensor.dtype != self.dtype(key):
            raise ConfigError(f"{path}: {key}: the chunk is not the {self.dtype(key)} tensor of shape {list(sizes)} that .metadata says")
        return tensor

    def _slice(self, index: MetadataIndex) -> bytes:
        info = self._info(index)
        with (self.directory / info.relative_path).open("rb") as file:
            return os.pread(file.fileno(), info.length, info.offset)

    def _info(self, index: MetadataIndex) -> _StorageInfo:
        try:
            return self._storage[index]
        except KeyError:
            raise ConfigError(f"{self.directory}: {index.fqn}: .metadata does not say where it is stored") from None
