"""Tensors that the trainer does not use (multi-token prediction, stored rotary frequencies): copied from file to file as bytes, whatever
their types."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.conversion.extent import copy_bytes
from megatron_rl.conversion.hf_io import header_bytes, read_header
from megatron_rl.conversion.partial import HashedFile

FOLDER = "passthrough"
"""In a Megatron directory."""
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Portion:
    """Some of the tensors of one safetensors file."""

    file: Path
    names: tuple[str, ...]

    def nbytes(self) -> int:
        entries, _ = read_header(self.file)
        return sum(end - start for start, end in (entries[name]["data_offsets"] for name in self.names))

    def copy(self, target: HashedFile, advance: Callable[[int], None]) -> None:
        """Write them to a file of their own."""
        entries, data = read_header(self.file)
        copied: dict[str, dict] = {}
        offset = 0
        for name in self.names:
            start, end = entries[name]["data_offsets"]
            copied[name] = {**entries[name], "data_offsets": [offset, offset + end - start]}
            offset += end - start
        target.write(header_bytes(copied))
        for name in self.names:
            start, end = entries[name]["data_offsets"]
            copy_bytes(self.file, data + start, end - start, target.write)
            advance(end - start)


def portions(directory: Path) -> list[Portion]:
    """All tensors of the safetensors files in a directory (which need not be there), by file."""
    return [Portion(file, tuple(read_header(file)[0])) for file in sorted(directory.glob("*.safetensors"))]


def same(portion: Portion, copies: dict[str, Path]) -> str | None:
    """The first tensor whose bytes differ from its copy (by name: the file that holds it); None where all are the same."""
    theirs, their_data = read_header(portion.file)
    for name in portion.names:
        ours, our_data = read_header(copies[name])
        (start, end), (our_start, our_end) = theirs[name]["data_offsets"], ours[name]["data_offsets"]
        if {**theirs[name], "data_offsets": None} != {**ours[name], "data_offsets": None} or end - start != our_end - our_start:
            return name
        with portion.file.open("rb") as source, copies[name].open("rb") as other:
            source.seek(their_data + start)
            other.seek(our_data + our_start)
            for at in range(start, end, _BLOCK):
                length = min(_BLOCK, end - at)
                if source.read(length) != other.read(length):
                    return name
    return None
