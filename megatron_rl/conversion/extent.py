"""Tensors as bytes in a file: most tensors of a checkpoint lie there as they go to the other side, and are copied without being made."""

import functools
import io
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Extent:
    """A contiguous tensor in C order: `nbytes` of a file from `offset`."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def copy_to(self, write: Callable[[memoryview], object]) -> None:
        copy_bytes(self.path, self.offset, self.nbytes, write)


def copy_bytes(path: Path, offset: int, length: int, write: Callable[[memoryview], object]) -> None:
    """Bytes [offset, offset + length) of a file, a block at a time. OSError where the file ends before."""
    buffer = memoryview(bytearray(min(length, _BLOCK)))
    end = offset + length
    with path.open("rb", buffering=0) as file:
        while offset < end:
            read = os.preadv(file.fileno(), [buffer[: min(_BLOCK, end - offset)]], offset)
            if not read:
                raise OSError(0, "ends too early; was it changed meanwhile?", str(path))
            write(buffer[:read])
            offset += read


@functools.lru_cache(256)
def archive(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes, bytes]:
    """What torch.save writes before and after the bytes of a contiguous tensor, and the pickle therein. No bytes of the tensor are in them:
    without CRC-32 (that nobody reads) an archive depends on shape and type alone."""
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        buffer = io.BytesIO()
        torch.save(torch.empty(shape, dtype=dtype), buffer)
    finally:
        torch.serialization.set_crc32_options(crc32)
    view = buffer.getbuffer()
    records = _records(buffer)
    start, length = records["data/0"]
    pickled, size = records["data.pkl"]
    return bytes(view[:start]), bytes(view[start + length :]), bytes(view[pickled : pickled + size])


def in_archive(path: Path, offset: int, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> Extent | None:
    """Where the bytes of a tensor are in the archive that torch.save wrote at [offset, offset + length) of a file; None where it holds
    anything but a contiguous tensor of this shape and type."""
    before, after, expected = archive(shape, dtype)
    with path.open("rb", buffering=0) as file:

        def at(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, offset + start)

        start, nbytes = len(before), length - len(before) - len(after)
        if at(0, start) != before or at(length - len(after), len(after)) != after:  # Megatron's writer leaves CRC-32 on
            try:
                records = _records(Window(file, offset, length))
                start, nbytes = records["data/0"]
                if at(*records["data.pkl"]) != expected or at(*records["byteorder"]) != b"little":
                    return None
            except (zipfile.BadZipFile, KeyError, struct.error):
                return None
    extent = Extent(path, offset + start, shape, dtype)
    return extent if nbytes == extent.nbytes else None


def _records(file: io.RawIOBase | io.BytesIO) -> dict[str, tuple[int, int]]:
    """Start and length of every record of an archive, without the name of its folder."""
    records = {}
    with zipfile.ZipFile(file) as opened:
        for info in opened.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(info.filename)
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            records[info.filename.partition("/")[2]] = info.header_offset + 30 + name + extra, info.file_size
    return records


class Window(io.RawIOBase):
    """Bytes [start, start + length) of a file as a file."""

    def __init__(self, file: io.RawIOBase, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        read = os.preadv(self._file.fileno(), [view], self._start + self._position)
        self._position += read
        return read
