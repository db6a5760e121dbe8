"""Writes a torch_dist checkpoint, chunk by chunk.

torch's own FileSystemWriter keeps every tensor of a file in memory until the file ends (`tensor_dict` in
torch/distributed/checkpoint/filesystem.py) and notes the path it wrote to, so the format is written here.
"""

import io
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.conversion.checkpoint_layout import Chunk
from megatron_rl.conversion.extent import Extent, archive
from megatron_rl.conversion.metadata import METADATA
from megatron_rl.conversion.partial import Partial

COMMON_STATE = "common_state/shard_0_1"
"""Where Megatron keeps everything that is no tensor."""


class DistWriter:
    """Files of chunks into a partial destination (in `folder` of it)."""

    def __init__(self, partial: Partial, folder: str = "") -> None:
        self.partial, self.folder = partial, folder
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def resumed(self, file: str) -> bool:
        """Whether the file is there already; its entries then count."""
        if (done := self.partial.finished.get(self._path(file))) is None:
            return False
        self._note(file, done["note"])
        return True

    def write(self, file: str, items: Iterable[tuple[str, tuple[int, ...] | None, Tensor | Extent | bytes]]) -> None:
        """One file of (key, offsets, chunk), or of (key, None, object), one in memory at a time."""
        entries = []
        stream = self.partial.create(self._path(file))
        for key, offsets, value in items:
            start = stream.tell()
            if isinstance(value, bytes):
                stream.write(value)
            else:
                before, after, _ = archive(tuple(value.shape), value.dtype)
                stream.write(before)
                value.copy_to(stream.write) if isinstance(value, Extent) else stream.write(_bytes(value))
                stream.write(after)
            entries.append([key, offsets, start, stream.tell() - start])
        self.partial.finish(self._path(file), entries)
        self._note(file, entries)

    def finish(
        self, chunks: Iterable[Chunk], shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype], objects: list[str]
    ) -> None:
        """Everything is written: .metadata, and Megatron's own two files.

        Args:
            chunks: all of them.
            shapes, dtypes: of the whole tensors, by key.
            objects: keys of the objects.
        """
        stored: dict[str, Any] = {
            key: TensorStorageMetadata(TensorProperties(dtype=dtypes[key]), torch.Size(shape), []) for key, shape in shapes.items()
        }
        for chunk in chunks:
            stored[chunk.key].chunks.append(ChunkStorageMetadata(torch.Size(chunk.region.offsets), torch.Size(chunk.region.sizes)))
        stored |= {key: BytesStorageMetadata() for key in objects}
        metadata = Metadata(stored, storage_data=self._storage, version=CURRENT_DCP_VERSION)
        self.partial.create(self._path(METADATA)).write(pickle.dumps(metadata))
        self.partial.finish(self._path(METADATA))
        self.partial.write_text(self._path("metadata.json"), json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))

    def sign(self) -> None:
        """Megatron's list of checksums over all that lies beside .metadata."""
        files = {
            Path(file).name: checksum
            for file, checksum in self.partial.checksums(besides=self._path("integrity.json")).items()
            if str(Path(file).parent) == (self.folder or ".")
        }
        self.partial.write_text(self._path("integrity.json"), json.dumps({"algorithm": "sha256", "files": files}, indent=2))

    def _path(self, file: str) -> str:
        return str(Path(self.folder) / file)

    def _note(self, file: str, entries: list[Any]) -> None:
        for key, offsets, start, length in entries:
            self._storage[MetadataIndex(key, offsets)] = _StorageInfo(file, start, length)


def empty_common_state() -> bytes:
    """What Megatron reads first, of a checkpoint that holds tensors alone."""
    data = io.BytesIO()
    torch.save([{}], data)
    return data.getvalue()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
