"""Megatron directory or training checkpoint -> HF directory, tensor by tensor, without building the model."""

import json
from pathlib import Path

from rich.console import Console

from megatron_rl.config.hf_directory import INDEX
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.checkpoint_layout import Row, cut
from megatron_rl.conversion.companions import copy_companions, write_config
from megatron_rl.conversion.hf_io import ShardWriter
from megatron_rl.conversion.hf_model import HFModel
from megatron_rl.conversion.megatron_model import MegatronModel
from megatron_rl.conversion.partial import Partial, check_paths, check_space, fingerprint
from megatron_rl.conversion.progress import ByteProgress
from megatron_rl.conversion.verify import verify

SHARD_BYTES = 1 << 32


def megatron_to_hf(
    source: Path,
    destination: Path,
    hf_dir: Path | None,
    *,
    resume: bool,
    check: bool,
    console: Console,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `destination`: safetensors shards with an index, config, tokenizer. Optimizer state and vocabulary padding stay behind. With
    `check`, sum up the source's files first, and read the destination again and compare before it appears. `hf_dir` as in MegatronModel.

    Raises:
        ConfigError: what is wrong with the source, the destination or the disk; nothing has appeared at `destination`.
    """
    check_paths(source, destination)
    model = MegatronModel(source, hf_dir)
    if check:
        model.check_integrity()
    shards = cut(model.rows, lambda row: _nbytes(model, row), shard_bytes)
    count = len(shards) + len(model.passthrough)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    identity = {
        "convert": "megatron-to-hf",
        "source": str(source.resolve()),
        "files": fingerprint(model.directory),
        "hf": str(model.hf_dir),
    }
    total = sum(_nbytes(model, row) for row in model.rows) + sum(portion.nbytes() for portion in model.passthrough)
    check_space(destination, total)
    partial = Partial(destination, {**identity, "shard_bytes": shard_bytes}, resume)
    weight_map: dict[str, str] = {}
    with partial.writing(), ByteProgress("megatron-to-hf", total, console) as progress:
        for name, shard in zip(names, shards, strict=False):
            weight_map |= {spec.name: name for row in shard for spec in model.specs(row)}
            if name in partial.finished:
                progress.advance(sum(_nbytes(model, row) for row in shard), resumed=True)
                continue
            with ShardWriter(partial.path / name, [spec for row in shard for spec in model.specs(row)]) as writer:
                for row in shard:
                    for tensor, value in model.tensors(row):
                        writer.write(tensor.name, value)
                        progress.advance(value.nbytes)
            partial.finish(name)
        for name, portion in zip(names[len(shards) :], model.passthrough, strict=True):
            weight_map |= dict.fromkeys(portion.names, name)
            if name in partial.finished:
                progress.advance(portion.nbytes(), resumed=True)
                continue
            portion.copy(partial.path / name, progress.advance)
            partial.finish(name)
        copy_companions(model.hf_dir, partial.path)
        if model.is_training:
            write_config(partial.path, {**model.config, **model.family.engine_config}, model.reader.dtype(model.rows[0].key))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        partial.write_text(INDEX, json.dumps(index, indent=2))
    if check:
        copy = HFModel(partial.path, ParallelConfig())
        verify(model, model.passthrough, copy, copy.passthrough(), total, console)
    partial.complete()


def _nbytes(model: MegatronModel, row: Row) -> int:
    return sum(spec.nbytes for spec in model.specs(row))
