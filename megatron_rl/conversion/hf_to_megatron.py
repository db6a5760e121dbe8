"""HF directory -> Megatron directory, chunk by chunk, without building the model."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from torch import Tensor

from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.checkpoint_layout import Chunk, Place, cut, place_chunks
from megatron_rl.conversion.companions import copy_companions
from megatron_rl.conversion.dist_writer import COMMON_STATE, DistWriter, empty_common_state
from megatron_rl.conversion.extent import Extent
from megatron_rl.conversion.hf_model import HFModel
from megatron_rl.conversion.megatron_model import HF, MARKER, MegatronModel, write_marker
from megatron_rl.conversion.partial import Partial, check_paths, check_space, fingerprint
from megatron_rl.conversion.passthrough import FOLDER
from megatron_rl.conversion.progress import ByteProgress
from megatron_rl.conversion.verify import verify

FILE_BYTES = 1 << 29
"""Of one file: what --resume does again at most, and what is brought to the disk while the next one is written."""


def hf_to_megatron(
    source: Path, destination: Path, layout: ParallelConfig, *, resume: bool, check: bool, console: Console, file_bytes: int = FILE_BYTES
) -> None:
    """Write `destination`, in the chunks of `layout`'s ranks. With `check`, read it again and compare before it appears.

    Raises:
        ConfigError: what is wrong with the source, the destination or the disk; nothing has appeared at `destination`.
    """
    check_paths(source, destination)
    model = HFModel(source, layout)
    places: dict[Place, list[Chunk]] = {}
    for row in model.rows:
        for place, chunk in place_chunks(row, row.key, row.shape, model.config, layout):
            places.setdefault(place, []).append(chunk)
    files = {
        f"__{number}_{part}.distcp": chunks
        for number, place in enumerate(sorted(places))
        for part, chunks in enumerate(cut(places[place], lambda chunk: _nbytes(model, chunk), file_bytes))
    }
    passthrough = model.passthrough()
    identity = {"convert": "hf-to-megatron", "source": str(source.resolve()), "files": fingerprint(source), "layout": layout.model_dump()}
    total = sum(_nbytes(model, chunk) for chunks in files.values() for chunk in chunks) + sum(p.nbytes() for p in passthrough)
    check_space(destination, total)
    partial = Partial(destination, {**identity, "file_bytes": file_bytes}, resume)
    with partial.writing(), ByteProgress("hf-to-megatron", total, console) as progress:
        writer = DistWriter(partial)
        for number, (file, chunks) in enumerate(files.items()):
            if writer.resumed(file):
                progress.advance(sum(_nbytes(model, chunk) for chunk in chunks), resumed=True)
            else:
                writer.write(file, _items(model, chunks, progress, with_common_state=number == 0))
        for portion in passthrough:
            file = f"{FOLDER}/{portion.file.name}"
            if file in partial.finished:
                progress.advance(portion.nbytes(), resumed=True)
            else:
                portion.copy(partial.create(file), progress.advance)
                partial.finish(file)
        (partial.path / HF).mkdir(exist_ok=True)
        copy_companions(source, partial.path / HF)
        shapes = {row.key: row.shape for row in model.rows}
        dtypes = {row.key: model.dtype(row) for row in model.rows}
        writer.finish((chunk for chunks in files.values() for chunk in chunks), shapes, dtypes, [COMMON_STATE])
        partial.write_text(MARKER, write_marker(model.family.name, model.tied_head, partial.checksums(besides=MARKER)))
    if check:
        copy = MegatronModel(partial.path, None)
        verify(model, passthrough, copy, copy.passthrough, total, console)
    partial.complete()


def _items(
    model: HFModel, chunks: list[Chunk], progress: ByteProgress, with_common_state: bool
) -> Iterator[tuple[str, tuple[int, ...] | None, Tensor | Extent | bytes]]:
    if with_common_state:
        yield COMMON_STATE, None, empty_common_state()
    for chunk in chunks:
        yield chunk.key, chunk.region.offsets, model.chunk(chunk)
        progress.advance(_nbytes(model, chunk))


def _nbytes(model: HFModel, chunk: Chunk) -> int:
    return chunk.region.numel * model.dtype(chunk.row).itemsize
