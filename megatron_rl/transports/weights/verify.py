"""Checksums of tensors, and reading a version into memory with every tensor checked against its manifest."""

from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from megatron_rl.transports.weights.base import WeightTransferError
from megatron_rl.transports.weights.manifest import Manifest, TensorEntry

if TYPE_CHECKING:
    import torch


def checksum(tensor: "torch.Tensor") -> str:
    """xxh3-64 of a CPU tensor's bytes in C order, as 16 hex digits. Any dtype, any strides, 0-d and empty included."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy()) if flat.numel() else xxhash.xxh3_64_hexdigest(b"")


def dtype_name(tensor: "torch.Tensor") -> str:
    """torch's name of the dtype without its prefix: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def entry_of(name: str, tensor: "torch.Tensor", file: str) -> TensorEntry:
    """The manifest row of a CPU tensor."""
    return TensorEntry(name, tuple(tensor.shape), dtype_name(tensor), checksum(tensor), file)


def check_layout(manifest: Manifest, held: Manifest) -> None:
    """Refuse a version whose tensors (name, shape, dtype) differ from those of the version already held.

    Raises WeightTransferError naming the first tensor that is missing, new or of another layout.
    """
    wanted = {entry.name: entry.layout for entry in held.tensors}
    offered = {entry.name: entry.layout for entry in manifest.tensors}
    for name in sorted(wanted.keys() - offered.keys()):
        raise WeightTransferError(f"version {manifest.version} lacks {name}, which version {held.version} had", name)
    for name in sorted(offered.keys() - wanted.keys()):
        raise WeightTransferError(f"version {manifest.version} has {name}, which version {held.version} had not", name)
    for name, layout in offered.items():
        if layout != wanted[name]:
            raise WeightTransferError(f"{name} is {layout} in version {manifest.version} but was {wanted[name]} in {held.version}", name)


def read_version(directory: Path, manifest: Manifest, verify: bool = True) -> "dict[str, torch.Tensor]":
    """Copy every tensor of the version into memory, in the manifest's order; nothing of it stays mapped to the files.

    Shape and dtype are always compared with the manifest, the checksum of the copy if `verify`.
    Raises WeightTransferError naming the tensor or the file.
    """
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for file in manifest.files:
        entries = [entry for entry in manifest.tensors if entry.file == file]
        try:
            with safe_open(directory / file, framework="pt", device="cpu") as source:
                present = set(source.keys())
                if unlisted := sorted(present - {entry.name for entry in entries}):
                    raise WeightTransferError(f"{file} holds {unlisted[0]}, which the manifest does not list in it", unlisted[0])
                for entry in entries:
                    if entry.name not in present:
                        raise WeightTransferError(f"{entry.name} is not in {file}, where the manifest lists it", entry.name)
                    tensors[entry.name] = _checked(source.get_tensor(entry.name).clone(), entry, verify)
        except (OSError, SafetensorError) as error:
            raise WeightTransferError(f"{directory / file} cannot be read: {error}") from error
    return {entry.name: tensors[entry.name] for entry in manifest.tensors}


def _checked(tensor: "torch.Tensor", entry: TensorEntry, verify: bool) -> "torch.Tensor":
    found = (tuple(tensor.shape), dtype_name(tensor))
    if found != entry.layout:
        raise WeightTransferError(f"{entry.name} is {found} in {entry.file} but {entry.layout} in the manifest", entry.name)
    if verify and (digest := checksum(tensor)) != entry.xxh3:
        raise WeightTransferError(f"{entry.name} in {entry.file} has checksum {digest}, its sender computed {entry.xxh3}", entry.name)
    return tensor
