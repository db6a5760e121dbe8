"""Attention of queries over one block of keys at a time: partial results that merge exactly, and one block's share of the gradients.

For scores s = scale * q k^T over the block's keys:
  lse = log sum exp(s),     out = exp(s - lse) v
Two blocks merge with l = logaddexp(lse_1, lse_2):  out = exp(lse_1 - l) out_1 + exp(lse_2 - l) out_2,  lse = l.
With the merged lse and delta = sum(d_out * out), each block's gradients need nothing of the other blocks:
  p = exp(s - lse),   d_v = p^T d_out,   d_s = p * (d_out v^T - delta) * scale,   d_q = d_s k,   d_k = d_s^T q
Source: Dao et al., arXiv:2205.14135; merging over devices as in ring attention, Liu et al., arXiv:2310.01889.

Shapes: query [n, h, s, d], key [n, g, k, d], value [n, g, k, d_v], where g divides h (grouped queries). All tensors are float32 or wider.
`causal` is for a block whose i-th key has the position of the i-th query (s == k).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

QUERY_ROWS = 512
"""Scores exist for so many queries of a document at a time."""


def block_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out [n, h, s, d_v], lse [n, h, s]) over this block alone."""
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    lse = query.new_empty(query.shape[:3])
    for rows, keys in _parts(query.shape[2], key.shape[2], causal):
        scores = _scores(query[:, :, rows], key[:, :, keys], scale, causal)
        lse_part = scores.logsumexp(-1, keepdim=True)
        lse[:, :, rows] = _by_head(lse_part, query.shape[1]).squeeze(-1)
        out[:, :, rows] = _by_head(scores.sub_(lse_part).exp_() @ value[:, :, keys], query.shape[1])
    return out, lse


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's result to `out` and `lse`, in place."""
    merged = torch.logaddexp(lse, block_lse)
    out.mul_((lse - merged).exp_().unsqueeze(-1)).addcmul_(block_out, (block_lse - merged).exp_().unsqueeze(-1))
    lse.copy_(merged)


def block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, delta: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of (d_query, d_key, d_value); grad [n, h, s, d_v], lse and delta [n, h, s] are of the merged result."""
    groups = key.shape[1]
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, keys in _parts(query.shape[2], key.shape[2], causal):
        grad_part, lse_part, delta_part = (_by_group(x, groups) for x in (grad[:, :, rows], lse[:, :, rows, None], delta[:, :, rows, None]))
        weights = _scores(query[:, :, rows], key[:, :, keys], scale, causal).sub_(lse_part).exp_()
        grad_value[:, :, keys] += weights.mT @ grad_part
        grad_scores = (grad_part @ value[:, :, keys].mT).sub_(delta_part).mul_(weights).mul_(scale)
        grad_query[:, :, rows] = _by_head(grad_scores @ key[:, :, keys], query.shape[1])
        grad_key[:, :, keys] += grad_scores.mT @ _by_group(query[:, :, rows], groups)
    return grad_query, grad_key, grad_value


def _parts(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows of queries, and the keys that any of them sees."""
    for start in range(0, queries, QUERY_ROWS):
        end = min(start + QUERY_ROWS, queries)
        yield slice(start, end), slice(0, end if causal else keys)


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """[n, g, h / g * s, k]; where causal, the last query sees every key."""
    scores = _by_group(query * scale, key.shape[1]) @ key.mT
    if causal:
        s, k = query.shape[2], key.shape[2]
        unseen = torch.ones(s, k, dtype=torch.bool, device=query.device).triu_(k - s + 1)
        scores.unflatten(2, (-1, s)).masked_fill_(unseen, float("-inf"))
    return scores


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[n, h, s, ...] -> [n, g, h / g * s, ...]: the queries of a group meet its keys in one product."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)
