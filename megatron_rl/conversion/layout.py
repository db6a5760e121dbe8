"""The placements and layouts of a family's table, both ways: slices of HF tensors <-> one tensor rank's shard of a Megatron tensor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.models.family import HFConfig, HFTensor, TensorRule, head_dim, key_value_heads, padded_vocab

SPLIT_DIM = {"column": 0, "row": 1, "vocab": 0, "replicated": None}


@dataclass(frozen=True)
class Shards:
    """How one row of the table is cut over `tensor_size` ranks."""

    rule: TensorRule
    hf: HFConfig
    dimensions: dict[str, int]
    tensor_size: int

    def shape(self, tensor: HFTensor) -> tuple[int, ...]:
        """Whole shape of one of the row's HF tensors."""
        return tuple(self.dimensions[dim] for dim in tensor.dims)

    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one rank's Megatron shard."""
        shapes = [list(self.shape(tensor)) for tensor in self.rule.hf]
        rows = padded_vocab(self.hf, self.tensor_size) if self.rule.placement == "vocab" else sum(shape[0] for shape in shapes)
        shape = [rows, *shapes[0][1:]]
        if (split := SPLIT_DIM[self.rule.placement]) is not None:
            shape[split] //= self.tensor_size
        return tuple(shape)

    def part(self, tensor: HFTensor, rank: int) -> tuple[slice, ...]:
        """The slice of an HF tensor that tensor rank `rank` holds (of the vocabulary: without the padding)."""
        shape = self.shape(tensor)
        split = SPLIT_DIM[self.rule.placement]
        size = padded_vocab(self.hf, self.tensor_size) if self.rule.placement == "vocab" else shape[split or 0]
        step = size // self.tensor_size
        return tuple(
            slice(rank * step, min((rank + 1) * step, length)) if dim == split else slice(0, length) for dim, length in enumerate(shape)
        )

    def assemble(self, parts: list[Tensor]) -> Tensor:
        """One rank's Megatron shard from its parts of the HF tensors; vocabulary padding is zero."""
        if self.rule.layout == "qkv":
            groups = self._local_groups()
            return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
        if self.rule.layout == "gate_up":
            return torch.cat(parts)
        if self.rule.placement == "vocab":
            padding = padded_vocab(self.hf, self.tensor_size) // self.tensor_size - parts[0].shape[0]
            return torch.nn.functional.pad(parts[0], (0, 0, 0, padding)) if padding else parts[0]
        return parts[0]

    def split(self, shard: Tensor) -> list[Tensor]:
        """Inverse of `assemble`, but for the vocabulary padding, which `join` drops."""
        if self.rule.layout == "qkv":
            grouped = shard.unflatten(0, (self._local_groups(), -1))
            width = head_dim(self.hf)
            return [part.flatten(0, 1) for part in grouped.split([grouped.shape[1] - 2 * width, width, width], dim=1)]
        if self.rule.layout == "gate_up":
            return list(shard.chunk(2))
        return [shard]

    def join(self, shards: list[Tensor]) -> list[Tensor]:
        """The whole HF tensors from every rank's Megatron shard, in rank order (of a replicated tensor: any one)."""
        split = SPLIT_DIM[self.rule.placement]
        if split is None or len(shards) == 1:
            whole = self.split(shards[0])
        else:
            whole = [torch.cat(parts, dim=split) for parts in zip(*map(self.split, shards), strict=True)]
        return [tensor[: self.dimensions["vocab"]] for tensor in whole] if self.rule.placement == "vocab" else whole

    def _local_groups(self) -> int:
        return key_value_heads(self.hf) // self.tensor_size
