"""An HF directory as the source of a conversion: checked whole, from its headers, before anything is written."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import INDEX
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion import directory
from megatron_rl.conversion.checkpoint_layout import HEAD, Chunk, Row, rows
from megatron_rl.conversion.extent import Extent
from megatron_rl.conversion.hf_io import TYPES, CheckpointReader
from megatron_rl.conversion.layout import Shards
from megatron_rl.conversion.passthrough import Portion
from megatron_rl.models.family import EMBEDDING_WEIGHT, HFTensor, tied
from megatron_rl.models.registry import check_supported, family_of, read_hf_config


class HFModel:
    """The tensors of an HF directory, by rows of its family's table.

    Raises:
        ConfigError: an unsupported model or layout, or a tensor that is missing, unexpected, misshaped, cut short, of a type that is not
            converted, or not equal to its tied twin. One line each.
    """

    def __init__(self, hf_dir: Path, layout: ParallelConfig) -> None:
        self.directory = hf_dir
        self.config = read_hf_config(hf_dir)
        if problems := check_supported(self.config, layout):
            raise ConfigError(*problems)
        self.family = family_of(self.config)
        if problems := list(directory.problems(hf_dir, self.config, self.family)):
            raise ConfigError(*problems)
        self.reader = CheckpointReader(hf_dir)
        self.rows: list[Row] = list(rows(self.family, self.config))
        self._check_index()
        self._check_dtypes()
        self.tied_head = tied(self.config) and HEAD in self.reader
        """Whether the file holds a tied embedding twice."""
        if self.tied_head:
            self._check_tied_head()

    def dtype(self, row: Row) -> torch.dtype:
        return TYPES[self.reader.dtype(row.rule.hf[0].name)]

    def chunk(self, chunk: Chunk) -> Tensor | Extent:
        """What the checkpoint holds at `chunk.region`: as bytes where they lie together in a file."""
        rule = chunk.row.rule
        shards = Shards(rule, self.config, chunk.row.whole.dimensions, chunk.size)
        tensors = rule.hf[chunk.part : chunk.part + 1] if rule.layout == "gate_up" else rule.hf
        if len(tensors) == 1 and (extent := self.reader.extent(tensors[0].name, shards.part(tensors[0], chunk.rank), chunk.region.sizes)):
            return extent
        parts = [self.reader.read(tensor.name, shards.shape(tensor), shards.part(tensor, chunk.rank)) for tensor in tensors]
        value = parts[0] if rule.layout == "gate_up" else shards.assemble(parts)
        sizes = chunk.region.sizes
        # Where ranks do not divide the vocabulary, the last one's rows end with padding, which no file holds.
        return value[: sizes[0]] if rule.placement == "vocab" else value.reshape(sizes)

    def tensors(self, row: Row) -> Iterator[tuple[HFTensor, Tensor]]:
        """The row's tensors as they are in the directory; with the embedding, its second copy."""
        for tensor in row.hf_tensors(self.tied_head):
            shape = row.whole.shape(tensor)
            yield tensor, self.reader.read(tensor.name, shape, tuple(slice(0, length) for length in shape))

    def passthrough(self) -> list[Portion]:
        """What the table has no row for, by file."""
        known = {tensor.name for row in self.rows for tensor in row.rule.hf} | ({HEAD} if self.tied_head else set())
        by_file: dict[str, list[str]] = {}
        for name, file in self.reader.files.items():
            if name not in known:
                by_file.setdefault(file, []).append(name)
        return [Portion(self.directory / file, tuple(names)) for file, names in sorted(by_file.items())]

    def _check_index(self) -> None:
        listed = set(self.reader.files.items())
        held = {(name, file) for file in set(self.reader.files.values()) for name in self.reader.names(file)}
        for name, file in sorted(listed - held):
            raise ConfigError(f"{self.directory / file}: tensor {name} is missing, though {INDEX} lists it")
        for name, file in sorted(held - listed):
            raise ConfigError(f"{self.directory / file}: tensor {name} is not where {INDEX} says; write the index anew")

    def _check_dtypes(self) -> None:
        """One Megatron tensor has one type, and it is one that the trainer holds exactly."""
        first: dict[str, str] = {}
        for row in self.rows:
            for tensor in row.rule.hf:
                path, dtype = self.directory / self.reader.files[tensor.name], self.reader.dtype(tensor.name)
                if dtype not in TYPES:
                    raise ConfigError(
                        f"{path}: tensor {tensor.name} is {dtype}; the trainer holds {' and '.join(TYPES)}, save it as one of them"
                    )
                other = first.setdefault(row.key, tensor.name)
                if self.reader.dtype(other) != dtype:
                    raise ConfigError(
                        f"{path}: tensor {tensor.name} is {dtype}, but {other} is {self.reader.dtype(other)}, and the two are parts of one "
                        f"Megatron tensor ({row.key}); save them as one type"
                    )

    def _check_tied_head(self) -> None:
        embedding = next(row for row in self.rows if row.rule.megatron == EMBEDDING_WEIGHT)
        (tensor, value), (_, copy) = self.tensors(embedding)
        if not same_bits(value, copy):
            raise ConfigError(
                f"{self.directory / self.reader.files[HEAD]}: tensor {HEAD} differs from {tensor.name}, though config.json ties them "
                f"(tie_word_embeddings); drop it, or set tie_word_embeddings to false"
            )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal type, shape and bytes (NaN equals itself, 0 is not -0)."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
