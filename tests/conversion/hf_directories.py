"""HF directories for conversion tests, read and written by safetensors itself."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FAMILIES = tiny_models.FAMILIES | tiny_models.VARIANTS
INDEX = "model.safetensors.index.json"


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Every tensor of an HF directory; with an index, exactly those it lists, each in the file it says."""
    if not (directory / INDEX).exists():
        return load_file(directory / "model.safetensors")
    listed = json.loads((directory / INDEX).read_text())["weight_map"]
    held = {(name, file.name): tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert held.keys() == set(listed.items())
    return {name: tensor for (name, _), tensor in held.items()}


def variant(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object], config: dict | None = None) -> Path:
    """A copy of a directory (one model.safetensors) whose tensors went through `change`, with other config fields."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((source / "config.json").read_text()) | (config or {})
    (target / "config.json").write_text(json.dumps(text))
    return target


def in_shards(source: Path, target: Path, count: int) -> Path:
    """A copy of a directory with its tensors dealt over `count` files, and an index."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = sorted(load_file(source / "model.safetensors").items())
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        save_file(dict(tensors[number::count]), target / file)
        weight_map |= {name: file for name, _ in tensors[number::count]}
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Names, types, shapes and bytes."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name
