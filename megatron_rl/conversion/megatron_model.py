"""A Megatron checkpoint as the source of a conversion: a directory that hf-to-megatron wrote, or a training checkpoint.

A converted directory holds the files of megatron.core.dist_checkpointing and
    megatron_rl.json    version of this layout
    hf/                 config.json, tokenizer, ... as the HF directory had them
    passthrough/        safetensors of the tensors that the trainer does not use
"""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import INDEX, WEIGHTS, read_json
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.checkpoint_layout import Row, rows
from megatron_rl.conversion.dist_reader import DistReader
from megatron_rl.conversion.dist_writer import COMMON_STATE
from megatron_rl.conversion.extent import Extent
from megatron_rl.conversion.hf_io import TensorSpec
from megatron_rl.conversion.hf_model import HFModel
from megatron_rl.conversion.partial import digest
from megatron_rl.conversion.passthrough import FOLDER, portions
from megatron_rl.models.family import HFTensor
from megatron_rl.models.registry import check_supported, family_of, read_hf_config

MARKER, FORMAT = "megatron_rl.json", 1
TRAINER_LAYOUT = 1
"""trainer.checkpoint.LAYOUT, which conversion may not import."""
HF = "hf"
INTEGRITY = "integrity.json"
OPTIMIZER = "optimizer."


class MegatronModel:
    """The tensors of a Megatron checkpoint, by rows of its family's table.

    Args:
        source: a converted directory, a run's checkpoints/step_<n>, or its trainer/.
        hf_dir: the HF directory that the model came from. A converted directory needs none; of a training checkpoint it is by default the
            model.path of the run it lies in.

    Raises:
        ConfigError: a newer layout, an unsupported model or layout, a tensor that is missing, unexpected, misshaped or cut short.
    """

    def __init__(self, source: Path, hf_dir: Path | None, layout: ParallelConfig | None = None) -> None:
        self.is_training = not (source / MARKER).is_file()
        self.directory = source / "trainer" if self.is_training and (source / "trainer").is_dir() else source
        marker = {} if self.is_training else read_marker(source)
        self.reader = DistReader(self.directory)
        if self.is_training:
            _check_training_layout(self.reader)
        self.hf_dir = hf_dir or (_model_of_run(source) if self.is_training else source / HF)
        self.config = read_hf_config(self.hf_dir)
        if problems := check_supported(self.config, layout or ParallelConfig()):
            raise ConfigError(*problems)
        self.family = family_of(self.config)
        self.rows: list[Row] = list(rows(self.family, self.config))
        self.passthrough, self.tied_head = portions(source / FOLDER), marker.get("tied_head", False)
        if self.is_training and any((self.hf_dir / name).is_file() for name in (INDEX, WEIGHTS)):
            origin = HFModel(self.hf_dir, ParallelConfig())
            self.passthrough, self.tied_head = origin.passthrough(), origin.tied_head
        self._check()

    def tensors(self, row: Row) -> Iterator[tuple[HFTensor, Tensor]]:
        """The row's tensors as an HF directory has them; with the embedding, its second copy where there was one."""
        regions = row.regions(row.shape, 0, 1)
        if row.rule.layout == "gate_up":
            values = [self.reader.read(row.key, region) for region in regions]
        else:
            values = row.whole.join([self.reader.read(row.key, regions[0]).reshape(row.whole.shard_shape())])
        tensors = row.hf_tensors(self.tied_head)
        for tensor, value in zip(tensors, [*values, *values[: len(tensors) - len(values)]], strict=True):
            yield tensor, value.reshape(row.whole.shape(tensor))

    def contents(self, row: Row) -> Iterator[tuple[HFTensor, Tensor | Extent]]:
        """As `tensors`, but as bytes where they lie together in a file."""
        tensors = row.hf_tensors(self.tied_head)
        regions = row.regions(row.shape, 0, 1)
        if row.rule.layout == "qkv":
            extents = [None]
        else:
            extents = [self.reader.extent(row.key, region) for region in regions * (len(tensors) // len(regions))]
        if None in extents:
            yield from self.tensors(row)
        else:
            for tensor, extent in zip(tensors, extents, strict=True):
                yield tensor, replace(extent, shape=row.whole.shape(tensor))

    def specs(self, row: Row) -> list[TensorSpec]:
        """Of `tensors`."""
        return [TensorSpec(t.name, row.whole.shape(t), self.reader.dtype(row.key)) for t in row.hf_tensors(self.tied_head)]

    def check_integrity(self) -> None:
        """ConfigError naming a file whose bytes are not those that were written: megatron_rl.json or Megatron's integrity.json knows."""
        if not self.is_training:
            listed, checksum, files = MARKER, "xxh3", read_marker(self.directory)["xxh3"]
        elif (self.directory / INTEGRITY).is_file():
            listed, checksum, files = INTEGRITY, "sha256", json.loads((self.directory / INTEGRITY).read_text())["files"]
        else:
            return
        for name, expected in files.items():
            if not (path := self.directory / name).is_file() or digest(path, checksum) != expected:
                raise ConfigError(f"{path}: damaged: it has not the checksum that {listed} says")

    def _check(self) -> None:
        for row in self.rows:
            if row.key not in self.reader.tensors:
                raise ConfigError(f"{self.directory}: tensor {row.key} ({row.rule.hf[0].name}) is missing")
            found = self.reader.shape(row.key)
            padded = row.rule.placement == "vocab" and found[0] >= row.shape[0] and found[1:] == row.shape[1:]
            if found != row.shape and not padded:
                raise ConfigError(
                    f"{self.directory}: tensor {row.key} has shape {list(found)}, {self.hf_dir / 'config.json'} asks for {list(row.shape)}"
                )
        known = {row.key for row in self.rows}
        for key in self.reader.tensors:
            if key not in known and not key.startswith(OPTIMIZER):
                raise ConfigError(
                    f"{self.directory}: unexpected tensor {key}; "
                    f"{self.hf_dir / 'config.json'} describes a {self.family.name} model without it"
                )
            there = sum(region.numel for region in self.reader.regions(key))
            if there != self.reader.tensors[key].size.numel():
                raise ConfigError(
                    f"{self.directory}: tensor {key}: its chunks hold {there} of {self.reader.tensors[key].size.numel()} elements"
                )


def write_marker(family: str, tied_head: bool, checksums: dict[str, str]) -> str:
    """What megatron_rl.json says.

    Args:
        tied_head: the HF directory holds the tied embedding a second time, as lm_head.weight.
        checksums: xxh3 (128 bits) of the directory's files.
    """
    return json.dumps({"format": FORMAT, "family": family, "tied_head": tied_head, "xxh3": checksums}, indent=1) + "\n"


def read_marker(source: Path) -> dict:
    """What `write_marker` wrote. ConfigError for a layout that this version does not know."""
    try:
        marker = read_json(source / MARKER)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if marker.get("format") != FORMAT:
        raise ConfigError(f"{source / MARKER}: format {marker.get('format')!r}, this version reads {FORMAT}; use the version that wrote it")
    return marker


def _check_training_layout(reader: DistReader) -> None:
    directory = reader.directory
    if COMMON_STATE not in reader.objects:
        raise ConfigError(f"{directory}: neither {MARKER} nor the step of a training run; this is no checkpoint of this project")
    try:
        [state] = torch.load(io.BytesIO(reader.read_object(COMMON_STATE)), weights_only=True)
        layout = state.get("layout")
    except Exception as error:  # whatever torch's reader meets in damaged bytes
        raise ConfigError(f"{directory}: {COMMON_STATE}: damaged: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    if layout != TRAINER_LAYOUT:
        raise ConfigError(f"{directory}: checkpoint layout {layout}, this version reads {TRAINER_LAYOUT}; use the version that wrote it")


def _model_of_run(source: Path) -> Path:
    """model.path of the run directory in which a training checkpoint lies."""
    step = source.resolve().parent if source.resolve().name == "trainer" else source.resolve()
    resolved = step.parent.parent / "configs" / "latest" / "resolved.json"
    try:
        return Path(read_json(resolved)["model"]["path"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{source}: a training checkpoint outside of its run directory does not say its model; give --model HF_DIR"
        ) from None
