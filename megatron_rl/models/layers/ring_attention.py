"""Causal attention over context ranks that pass their keys and values around a ring.

A rank holds its own block, the one at work and the one arriving, however many ranks there are.

Every rank keeps its queries and, step by step, meets the block that started on rank, rank - 1, ... With the zigzag layout (rank r holds
chunks r and 2 n - 1 - r of every sequence) no block needs a mask, and each costs every rank the same:
  its own block                causal over its share, whose positions ascend
  a block from a lower rank    all queries see the block's first chunk, none its second
  a block from a higher rank   the second chunk of queries sees the whole block, the first none of it
The backward sends the blocks around again, and their gradients one step behind, so that these arrive where the block started.
Source: ring attention, Liu et al., arXiv:2310.01889; the balanced layout as in Megatron-Core.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.kernels.attention.reference import block_backward, block_forward, merge

Runs = list[tuple[int, int]]
"""(length, count) of neighbouring sequences of one length: what they hold on this rank, in order."""


def ring_attention(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float, group: dist.ProcessGroup) -> Tensor:
    """[t, b, h, d], [t, b, g, d] and [t, b, g, d_v] of this rank's tokens -> [t, b, h, d_v]; partial results are kept in float32.

    Args:
        runs: this rank's shares of the sequences; each length is even, and they cover the t tokens.
    """
    return _Ring.apply(query, key, value, runs, scale, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: Runs,
        scale: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        own = torch.cat([key, value], dim=-1)
        widths = [key.shape[-1], value.shape[-1]]
        queries = _by_run(query, runs)
        outs, lses = [], []
        for source, block in _blocks(own, group):
            for number, (q, kv) in enumerate(zip(queries, _by_run(block, runs), strict=True)):
                rows, keys, causal = _visible(source, group.rank(), q.shape[2])
                out, lse = block_forward(q[:, :, rows], *kv[:, :, keys].split(widths, dim=-1), scale, causal)
                if source == group.rank():
                    outs.append(out)
                    lses.append(lse)
                else:
                    merge(outs[number][:, :, rows], lses[number][:, :, rows], out, lse)
        result = _from_runs(outs, runs).to(query.dtype)
        ctx.save_for_backward(query, own, result, *lses)
        ctx.runs, ctx.widths, ctx.scale, ctx.group = runs, widths, scale, group
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, own, result, *lses = ctx.saved_tensors
        runs, widths, group = ctx.runs, ctx.widths, ctx.group
        queries, grads = _by_run(query, runs), _by_run(grad, runs)
        deltas = [(g * out).sum(-1) for g, out in zip(grads, _by_run(result, runs), strict=True)]
        grad_queries = [torch.zeros_like(q) for q in queries]
        passed = None
        for source, block in _blocks(own, group):
            grad_blocks = []
            for q, g, lse, delta, grad_q, kv in zip(queries, grads, lses, deltas, grad_queries, _by_run(block, runs), strict=True):
                rows, keys, causal = _visible(source, group.rank(), q.shape[2])
                k, v = kv[:, :, keys].split(widths, dim=-1)
                part = block_backward(g[:, :, rows], q[:, :, rows], k, v, lse[:, :, rows], delta[:, :, rows], ctx.scale, causal)
                grad_q[:, :, rows] += part[0]
                grad_blocks.append(torch.zeros_like(kv))
                grad_blocks[-1][:, :, keys] = torch.cat(part[1:], dim=-1)
            grad_block = _from_runs(grad_blocks, runs)
            if passed is not None:
                grad_block += _received(passed)
            passed = _pass_on(grad_block, group, tag=1)
        grad_key, grad_value = _received(passed).to(own.dtype).split(widths, dim=-1)
        return _from_runs(grad_queries, runs).to(query.dtype), grad_key, grad_value, None, None, None


def _blocks(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """(rank where it started, block), beginning with our own; the next block travels while the caller works on this one."""
    block = own
    for step in range(group.size()):
        passed = _pass_on(block, group, tag=0) if step + 1 < group.size() else None
        yield (group.rank() - step) % group.size(), block
        if passed is not None:
            block = _received(passed)


def _pass_on(block: Tensor, group: dist.ProcessGroup, tag: int) -> tuple[Tensor, Tensor, list[dist.Work]]:
    """Send to the next rank, receive from the one before; the sent tensor stays referenced until it is gone."""
    received = torch.empty_like(block)
    following, previous = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    operations = [
        dist.P2POp(dist.isend, block, group=group, tag=tag, group_peer=following),
        dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=previous),
    ]
    return received, block, dist.batch_isend_irecv(operations)


def _received(passed: tuple[Tensor, Tensor, list[dist.Work]]) -> Tensor:
    received, _, works = passed
    for work in works:
        work.wait()
    return received


def _visible(source: int, rank: int, share: int) -> tuple[slice, slice, bool]:
    """Which of our `share` queries see which keys of a block from `source`, and whether causally."""
    half = share // 2
    if source == rank:
        return slice(0, share), slice(0, share), True
    if source < rank:
        return slice(0, share), slice(0, half), False
    return slice(half, share), slice(0, share), False


def _by_run(x: Tensor, runs: Runs) -> list[Tensor]:
    """[t, b, h, d] -> [count * b, h, length, d] per run, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    parts = x.split([length * count for length, count in runs])
    return [
        part.unflatten(0, (count, length)).permute(0, 2, 3, 1, 4).flatten(0, 1) for part, (length, count) in zip(parts, runs, strict=True)
    ]


def _from_runs(parts: list[Tensor], runs: Runs) -> Tensor:
    return torch.cat(
        [part.unflatten(0, (count, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1) for part, (_, count) in zip(parts, runs, strict=True)]
    )
