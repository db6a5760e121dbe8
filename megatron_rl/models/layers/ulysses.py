"""Context parallel by exchanging heads for tokens: each rank attends over whole sequences with its share of the heads.

One all-to-all before attention and one after it, forward and backward. Source: DeepSpeed Ulysses, Jacobs et al., arXiv:2309.14509.
"""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.models.layers.context_parallel import ExchangeSequence, zigzag_indices
from megatron_rl.models.layers.head_exchange import head_problem

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], attend: Attend, group: dist.ProcessGroup) -> Tensor:
    """[t, b, h, d], [t, b, g, d] and [t, b, g, d_v] of this rank's tokens -> [t, b, h, d_v].

    Args:
        lengths: whole lengths of the sequences.
        attend: attention of whole sequences in order, [size * t, b, heads of a rank, ...] -> [size * t, b, heads, d_v].

    Raises:
        ValueError: the heads do not divide (`head_problem`).
    """
    size, (tokens, batch, heads), groups = group.size(), query.shape[:3], key.shape[2]
    if problem := head_problem(heads, groups, size):
        raise ValueError(problem)
    # Ranks outnumber the key-value heads: each takes the one that its queries share.
    copies = max(1, size // groups)
    key, value = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (key, value))
    by_rank = [x.unflatten(2, (size, -1)) for x in (query, key, value)]
    shapes = [x.shape[3:] for x in by_rank]
    # [t, b, size, heads * d of all three] -> [size, t, b, ...], then every rank's tokens of our heads, in the sequences' order.
    sent = torch.cat([x.flatten(3) for x in by_rank], dim=3).permute(2, 0, 1, 3)
    order = _zigzag_order(lengths, size).to(query.device)
    received = ExchangeSequence.apply(sent, group).flatten(0, 1).index_select(0, order.argsort())
    parts = received.split([shape.numel() for shape in shapes], dim=2)
    output = attend(*(part.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True)))
    back = output.index_select(0, order).view(size, tokens, batch, -1)
    return ExchangeSequence.apply(back, group).permute(1, 2, 0, 3).reshape(tokens, batch, heads, -1)


def _zigzag_order(lengths: list[int], size: int) -> Tensor:
    """Whole-pack index of each token when the ranks' shares follow one another, [size * t]."""
    offsets = list(itertools.accumulate(lengths, initial=0))
    return torch.cat([zigzag_indices(offsets, rank, size) for rank in range(size)])
