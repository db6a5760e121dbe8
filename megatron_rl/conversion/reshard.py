"""Megatron checkpoint -> the same one in the chunks of another layout, with its optimizer state, so that ranks read whole chunks."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from torch import Tensor

from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.checkpoint_layout import Chunk, Place, cut, place_chunks
from megatron_rl.conversion.dist_reader import DistReader
from megatron_rl.conversion.dist_writer import DistWriter
from megatron_rl.conversion.extent import Extent, copy_bytes
from megatron_rl.conversion.hf_model import same_bits
from megatron_rl.conversion.hf_to_megatron import FILE_BYTES
from megatron_rl.conversion.megatron_model import INTEGRITY, MARKER, OPTIMIZER, MegatronModel, write_marker
from megatron_rl.conversion.metadata import METADATA
from megatron_rl.conversion.partial import Partial, check_paths, check_space, fingerprint
from megatron_rl.conversion.progress import ByteProgress
from megatron_rl.conversion.verify import VerificationFailed

_STATE = OPTIMIZER + "state."
_WRITTEN = (METADATA, "metadata.json", INTEGRITY, MARKER)


def reshard(
    source: Path,
    destination: Path,
    layout: ParallelConfig,
    hf_dir: Path | None,
    *,
    resume: bool,
    check: bool,
    console: Console,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `destination`. Tensors keep their keys, whole shapes and bits; objects their bytes; all other files are copied. With `check`,
    read it again and compare before it appears. `hf_dir` as in MegatronModel.

    Raises:
        ConfigError: what is wrong with the source, the destination or the disk; nothing has appeared at `destination`.
    """
    check_paths(source, destination)
    model = MegatronModel(source, hf_dir, layout)
    model.check_integrity()
    reader, folder = model.reader, str(model.directory.relative_to(source))
    places = _chunks(model, layout)
    files = {
        f"__{number}_{part}.distcp": chunks
        for number, place in enumerate(sorted(places))
        for part, chunks in enumerate(cut(places[place], lambda chunk: _nbytes(reader, chunk), file_bytes))
    }
    identity = {"convert": "reshard", "source": str(source.resolve()), "files": fingerprint(source), "layout": layout.model_dump()}
    total = sum(map(reader.nbytes, reader.tensors))
    check_space(destination, total)
    partial = Partial(destination, {**identity, "file_bytes": file_bytes}, resume, "sha256" if model.is_training else "xxh3")
    with partial.writing():
        _copy_rest(source, model.directory, partial)
        with ByteProgress("reshard", total, console) as progress:
            writer = DistWriter(partial, folder)
            for number, (file, chunks) in enumerate(files.items()):
                if writer.resumed(file):
                    progress.advance(sum(_nbytes(reader, chunk) for chunk in chunks), resumed=True)
                else:
                    writer.write(file, _items(reader, chunks, progress, with_objects=number == 0))
            chunks = (chunk for chunks in files.values() for chunk in chunks)
            shapes = {key: reader.shape(key) for key in reader.tensors}
            writer.finish(chunks, shapes, {key: reader.dtype(key) for key in reader.tensors}, reader.objects)
            if model.is_training:
                writer.sign()
            else:
                partial.write_text(MARKER, write_marker(model.family.name, model.tied_head, partial.checksums(besides=MARKER)))
    if check:
        _verify(reader, DistReader(partial.path / folder), files, total, console)
    partial.complete()


def _chunks(model: MegatronModel, layout: ParallelConfig) -> dict[Place, list[Chunk]]:
    """Every tensor's chunks; the optimizer's state of a parameter lies with the parameter."""
    like: dict[str, list[str]] = {}
    for key in model.reader.tensors:
        # optimizer.state.exp_avg.decoder.final_norm.weight
        parameter = key.removeprefix(_STATE).partition(".")[2] if key.startswith(_STATE) else key
        like.setdefault(parameter, []).append(key)
    places: dict[Place, list[Chunk]] = {}
    for row in model.rows:
        for key in like[row.key]:
            if model.reader.shape(key) != model.reader.shape(row.key):
                raise ConfigError(
                    f"{model.directory}: {key} has not the shape of {row.key}; save with Megatron's fully reshardable optimizer"
                )
            for place, chunk in place_chunks(row, key, model.reader.shape(key), model.config, layout):
                places.setdefault(place, []).append(chunk)
    if strange := sorted(like.keys() - {row.key for row in model.rows}):
        raise ConfigError(
            f"{model.directory}: {like[strange[0]][0]} belongs to no parameter; save with Megatron's fully reshardable optimizer"
        )
    return places


def _copy_rest(source: Path, checkpoint: Path, partial: Partial) -> None:
    """Everything that is not the checkpoint's own."""
    for path in source.rglob("*"):
        name = str(path.relative_to(source))
        own = path.parent == checkpoint and (path.name in _WRITTEN or path.suffix == ".distcp")
        if path.is_file() and not own and name not in partial.finished:
            copy_bytes(path, 0, path.stat().st_size, partial.create(name).write)
            partial.finish(name)
    (partial.path / checkpoint.relative_to(source)).mkdir(exist_ok=True)


def _items(
    reader: DistReader, chunks: list[Chunk], progress: ByteProgress, with_objects: bool
) -> Iterator[tuple[str, tuple[int, ...] | None, Tensor | Extent | bytes]]:
    if with_objects:
        for key in reader.objects:
            yield key, None, reader.read_object(key)
    for chunk in chunks:
        yield chunk.key, chunk.region.offsets, reader.extent(chunk.key, chunk.region) or reader.read(chunk.key, chunk.region)
        progress.advance(_nbytes(reader, chunk))


def _verify(source: DistReader, copy: DistReader, files: dict[str, list[Chunk]], total: int, console: Console) -> None:
    with ByteProgress("verify", total, console) as progress:
        for chunk in (chunk for chunks in files.values() for chunk in chunks):
            if not same_bits(source.read(chunk.key, chunk.region), copy.read(chunk.key, chunk.region)):
                raise VerificationFailed(f"{copy.directory}: tensor {chunk.key} differs from the one in {source.directory}")
            progress.advance(_nbytes(source, chunk))
    for key in source.objects:
        if source.read_object(key) != copy.read_object(key):
            raise VerificationFailed(f"{copy.directory}: object {key} differs from the one in {source.directory}")


def _nbytes(reader: DistReader, chunk: Chunk) -> int:
    return chunk.region.numel * reader.dtype(chunk.key).itemsize
