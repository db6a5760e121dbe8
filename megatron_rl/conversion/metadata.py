"""The .metadata file of a torch_dist checkpoint. It is a pickle by format, so it is read with the few names that a checkpoint needs."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_rl.config.base import ConfigError

METADATA = ".metadata"
_ALLOWED = {
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # Megatron keeps the plan of every rank as well.
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}


def read_metadata(directory: Path) -> Metadata:
    """What the checkpoint in `directory` holds, and where.

    Raises:
        ConfigError: there is none, it is damaged, it names anything but a checkpoint's own classes (nothing of it is then run), or its
            files are not there as long as it says.
    """
    path = directory / METADATA
    try:
        metadata = _Unpickler(path).load()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a directory that megatron.core.dist_checkpointing wrote") from None
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged pickle makes its reader do
        raise ConfigError(f"{path}: damaged: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise ConfigError(f"{path}: damaged: no checkpoint metadata")
    _check_files(directory, metadata)
    return metadata


def _check_files(directory: Path, metadata: Metadata) -> None:
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        file, key = info.relative_path, index.fqn
        if Path(file).name != file:
            raise ConfigError(f"{directory / METADATA}: {key}: file {file!r} is not a plain name")
        if getattr(info, "transform_descriptors", None):
            raise ConfigError(f"{directory / METADATA}: {key}: stored through {info.transform_descriptors}, which is not supported")
        if file not in sizes:
            try:
                sizes[file] = (directory / file).stat().st_size
            except OSError as error:
                raise ConfigError(f"{directory / file}: {error.strerror}; it holds {key}") from None
        if info.offset + info.length > sizes[file]:
            raise ConfigError(f"{directory / file}: cut short: {key} ends at byte {info.offset + info.length} of {sizes[file]}")
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and not stored.chunks:
            raise ConfigError(f"{directory / METADATA}: {key}: no chunk of it is there")


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise ConfigError(f"{self.path}: refers to {module}.{name}, which no checkpoint needs; it is damaged or malicious")
