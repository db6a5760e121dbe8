"""Files through which the two sides' tensors meet: safetensors in parts, reals as float32. Neither side holds a second copy of all its
tensors, and reading needs no torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor

PART_BYTES = 1 << 30


def write(path: Path, tensors: Iterable[tuple[str, "Tensor"]]) -> None:
    """Write `<path>.<part>.safetensors`; holds one part at a time."""
    from safetensors.torch import save_file

    part: dict[str, Tensor] = {}
    number = size = 0
    for name, tensor in tensors:
        part[name] = (tensor.detach().float() if tensor.is_floating_point() else tensor).cpu().clone()
        size += part[name].nbytes
        if size >= PART_BYTES:
            save_file(part, f"{path}.{number}.safetensors")
            part, number, size = {}, number + 1, 0
    save_file(part, f"{path}.{number}.safetensors")


class Tensors:
    """All tensors under paths that begin with `<folder>/<prefix>.`, read one at a time."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._files = [safe_open(path, framework="numpy") for path in sorted(folder.glob(f"{prefix}.*safetensors"))]
        self._file_of: dict[str, safe_open] = {}
        for file in self._files:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in self._file_of:
                    raise RuntimeError(f"two ranks wrote {name}")
                self._file_of[name] = file

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> np.ndarray:
        return self._file_of[name].get_tensor(name)
