"""Where a model's tensors lie in a Megatron checkpoint: keys, whole shapes, and the chunks that the ranks of a layout hold.

A layout only decides how tensors are cut into chunks and chunks into files; any layout loads any checkpoint.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.layout import SPLIT_DIM, Shards
from megatron_rl.models.family import EMBEDDING_WEIGHT, Family, HFConfig, HFTensor, TensorRule
from megatron_rl.models.naming import checkpoint_key, entry_of

HEAD = "lm_head.weight"
T = TypeVar("T")


@dataclass(frozen=True)
class Region:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def intersection(self, other: "Region") -> "Region | None":
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """This box as slices of `outer`, which contains it."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, outer.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Row:
    """A row of the family's table (numbers filled in) in a checkpoint."""

    rule: TensorRule
    key: str
    expert: int | None
    """Its place on the key's leading axis, for an expert's tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor under `key`, without vocabulary padding: [experts, ...] for an expert's."""
    whole: Shards

    def hf_tensors(self, tied_head: bool) -> tuple[HFTensor, ...]:
        """The row's tensors in an HF directory; where that holds a tied embedding twice, both."""
        if tied_head and self.rule.megatron == EMBEDDING_WEIGHT:
            return (*self.rule.hf, replace(self.rule.hf[0], name=HEAD))
        return self.rule.hf

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> list[Region]:
        """What tensor rank `rank` of `size` holds of the row, in a tensor of this `shape` (that may have vocabulary padding). Gate and
        up are two regions: Megatron stacks the whole gate on the whole up."""
        lead = 0 if self.expert is None else 1
        offsets, sizes = ([0], [shape[0]]) if not lead else ([self.expert], [1])
        offsets, sizes = [*offsets, *[0] * (len(shape) - 1)], [*sizes, *shape[1:]]
        parts = len(self.rule.hf) if self.rule.layout == "gate_up" else 1
        split = SPLIT_DIM[self.rule.placement]
        axis = lead + (split or 0)
        length = shape[axis] // parts
        step = length if split is None else -(-length // size)
        boxes = []
        for part in range(parts):
            offsets[axis], sizes[axis] = part * length + rank * step, min(step, length - rank * step)
            boxes.append(Region(tuple(offsets), tuple(sizes)))
        return boxes


@dataclass(frozen=True)
class Chunk:
    """One region of one row: what is read and written at a time."""

    row: Row
    key: str
    region: Region
    rank: int
    size: int
    """Tensor ranks."""
    part: int
    """Of the row's HF tensors the one it is made of; of anything but gate and up: 0, and it is made of all."""


Place = tuple[int, int, int]
"""Pipeline stage, expert rank, tensor rank: the ranks that hold the same chunks share files."""


def rows(family: Family, hf: HFConfig) -> Iterator[Row]:
    """Every row of the model, in the order of the forward pass."""
    dimensions = family.dimensions(hf)
    for rule in family.tensors(hf):
        entry = entry_of(rule.megatron)
        key, expert = checkpoint_key(rule.megatron, None if entry is None else family.block(hf, entry // 2)[entry % 2])
        whole = Shards(rule, hf, dimensions, 1)
        shape = whole.shard_shape() if expert is None else (dimensions["experts"], *whole.shard_shape())
        yield Row(rule, key, expert, shape, whole)


def place_chunks(row: Row, key: str, shape: tuple[int, ...], hf: HFConfig, layout: ParallelConfig) -> Iterator[tuple[Place, Chunk]]:
    """The chunks of one row in a tensor `key` of this `shape`, each with its place in the layout."""
    tensor_size = layout.tensor_parallel if row.expert is None else layout.expert_tensor_parallel or layout.tensor_parallel
    size = 1 if row.rule.placement == "replicated" else tensor_size
    expert_rank = 0 if row.expert is None else row.expert // (row.shape[0] // layout.expert_parallel)
    for rank in range(size):
        for part, region in enumerate(row.regions(shape, rank, size)):
            yield (_stage(row.rule, hf, layout), expert_rank, rank), Chunk(row, key, region, rank, size, part)


def _stage(rule: TensorRule, hf: HFConfig, layout: ParallelConfig) -> int:
    """The pipeline stage of a row; the stack's segments go round the stages, chunk by chunk."""
    if rule.megatron == EMBEDDING_WEIGHT:
        return 0
    if (entry := entry_of(rule.megatron)) is None:
        return layout.pipeline_parallel - 1
    return layout.chunk_of(entry // 2, hf["num_hidden_layers"]) % layout.pipeline_parallel


def cut(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> list[list[T]]:
    """Into lists of at most `limit` bytes (or one item), order kept."""
    lists: list[list[T]] = []
    room = 0
    for item in items:
        if not lists or nbytes(item) > room:
            lists.append([])
            room = limit
        lists[-1].append(item)
        room -= nbytes(item)
    return lists
