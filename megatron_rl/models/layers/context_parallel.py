"""Megatron's load-balanced context-parallel layout, sequence by sequence.

A sequence of n tokens is cut into 2 * size chunks; rank r holds chunks r and 2 * size - 1 - r, so that causal attention costs every rank
the same. Packed sequences are each cut this way, and a rank's shares follow one another.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def share(length: int, size: int) -> int:
    """Tokens of a sequence that each of `size` ranks holds.

    Raises:
        ValueError: length is not a multiple of 2 * size (of 1, when size is 1).
    """
    if size > 1 and length % (2 * size):
        raise ValueError(
            f"a sequence of {length} tokens does not divide over context_parallel = {size}: pad it to a multiple of {2 * size}"
        )
    return length // size


def zigzag(length: int, rank: int, size: int) -> Tensor:
    """Positions within one sequence of `length` that `rank` of `size` holds, [length / size] int64.

    Raises:
        ValueError: as `share`.
    """
    held = share(length, size)
    if size == 1:
        return torch.arange(length)
    first = torch.arange(held // 2)
    return torch.cat([first + rank * (held // 2), first + (2 * size - 1 - rank) * (held // 2)])


def zigzag_indices(cu_seqlens: Sequence[int], rank: int, size: int) -> Tensor:
    """Indices into the packed tokens that `rank` of `size` holds, [cu_seqlens[-1] / size] int64.

    `cu_seqlens` are the offsets of the padded sequences (numbers, an array or a CPU tensor): of [0, 4, 8], rank 0 of 2 holds [0, 3, 4, 7].
    """
    offsets = [int(offset) for offset in cu_seqlens]
    return torch.cat([start + zigzag(end - start, rank, size) for start, end in itertools.pairwise(offsets)])


class GatherSequence(torch.autograd.Function):
    """[t, ...] of every rank -> [size, t, ...]; the backward sums each rank's slice over the ranks."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered.view(group.size(), *local.shape)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        local = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(local, grad.contiguous().flatten(0, 1), group=ctx.group)
        return local, None


class ExchangeSequence(torch.autograd.Function):
    """[size, t, ...] -> the same shape: entry r goes to rank r, and entry r of the result came from there. Its own backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return ExchangeSequence.apply(grad, ctx.group), None
