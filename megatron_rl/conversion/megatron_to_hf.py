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
from megatron_rl.conversion.quantize import Quantized, RecipeName
from megatron_rl.conversion.verify import verify, verify_quantized

SHARD_BYTES = 1 << 32


def megatron_to_hf(
    source: Path,
    destination: Path,
    hf_dir: Path | None,
    quantize: RecipeName | None = None,
    *,
    resume: bool,
    check: bool,
    console: Console,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `destination`: safetensors shards with an index, config, tokenizer. Optimizer state and vocabulary padding stay behind. With
    `check`, read the destination again and compare before it appears. `hf_dir` as in MegatronModel.
    With `quantize`, the weights of linears are as module quantize says, and are compared within the precision of their format.

    Raises:
        ConfigError: what is wrong with the source, the destination or the disk; nothing has appeared at `destination`.
    """
    check_paths(source, destination)
    model = MegatronModel(source, hf_dir)
    exported = Quantized(model, quantize) if quantize else model
    model.check_integrity()
    shards = cut(model.rows, lambda row: _nbytes(exported, row), shard_bytes)
    count = len(shards) + len(model.passthrough)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    identity = {
        "convert": "megatron-to-hf",
        "source": str(source.resolve()),
        "files": fingerprint(model.directory),
        "hf": str(model.hf_dir),
        "quantize": quantize,
    }
    total = sum(_nbytes(exported, row) for row in model.rows) + sum(portion.nbytes() for portion in model.passthrough)
    check_space(destination, total)
    partial = Partial(destination, {**identity, "shard_bytes": shard_bytes}, resume)
    contents = model.contents if exported is model else exported.tensors
    weight_map: dict[str, str] = {}
    with partial.writing(), ByteProgress("megatron-to-hf", total, console) as progress:
        for name, shard in zip(names, shards, strict=False):
            weight_map |= {spec.name: name for row in shard for spec in exported.specs(row)}
            if name in partial.finished:
                progress.advance(sum(_nbytes(exported, row) for row in shard), resumed=True)
                continue
            specs = [spec for row in shard for spec in exported.specs(row)]
            with ShardWriter(partial.path / name, specs, partial.create(name)) as writer:
                for row in shard:
                    for spec, (_, value) in zip(exported.specs(row), contents(row), strict=True):
                        writer.write(spec.name, value)
                        progress.advance(value.nbytes)
            partial.finish(name)
        for name, portion in zip(names[len(shards) :], model.passthrough, strict=True):
            weight_map |= dict.fromkeys(portion.names, name)
            if name in partial.finished:
                progress.advance(portion.nbytes(), resumed=True)
                continue
            portion.copy(partial.create(name), progress.advance)
            partial.finish(name)
        copy_companions(model.hf_dir, partial.path)
        if model.is_training:
            write_config(partial.path, {**model.config, **model.family.engine_config}, model.reader.dtype(model.rows[0].key))
        if isinstance(exported, Quantized):
            exported.write_config(partial.path)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        partial.write_text(INDEX, json.dumps(index, indent=2))
    if check and isinstance(exported, Quantized):
        verify_quantized(exported, partial.path, total, console)
    elif check:
        copy = HFModel(partial.path, ParallelConfig())
        verify(model, model.passthrough, copy, copy.passthrough(), total, console)
    partial.complete()


def _nbytes(model: MegatronModel | Quantized, row: Row) -> int:
    return sum(spec.nbytes for spec in model.specs(row))
