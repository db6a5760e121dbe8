"""Log-probabilities and entropy from hidden states, without ever holding the logits of more than one chunk of tokens.

With logits z = hidden @ weight^T / temperature over the whole vocabulary:
  logprob[i] = z[i, label[i]] - logsumexp(z[i]),     d logprob[i] / d z[i, j] = (j == label[i]) - softmax(z[i])[j]
  entropy[i] = logsumexp(z[i]) - sum_j softmax(z[i])[j] * z[i, j]

The vocabulary may be split by rows over a tensor-parallel group. Each rank keeps, per token, (m, s, t) = (max z, sum exp(z - m),
sum exp(z - m) * (z - m)) of its rows; two all-reduces at the end merge them: with M the largest m,
  S = sum over ranks of exp(m - M) * s,     T = sum over ranks of exp(m - M) * (t + s * (m - M)),
  logsumexp = M + log S,     entropy = log S - T / S.
The merge is the one of online softmax (Milakov and Gimelshein, arXiv:1805.02867).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.platform import matmul_float32


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution.

    Args:
        hidden: [n, h], float32 or bfloat16; the same on every rank of `group`.
        weight: [v_local, h], same type: rows vocab_start .. vocab_start + v_local of the output matrix. Rows at or past `vocab_size` are
            padding: they take no part in the softmax and get a zero gradient.
        labels: [n] int64 in [0, vocab_size); others give a meaningless log-probability.
        temperatures: [n] float32 > 0; divide the logits.
        group: tensor-parallel group, or None when the vocabulary is whole.
        chunk_tokens: logits exist for so many tokens at a time; the result does not depend on it beyond rounding.

    Returns:
        logprobs [n] float32, differentiable in hidden and weight, and entropy [n] float32 in nats, without gradient. The gradient of
        `hidden` is this rank's share: the caller sums it over `group`.
    """
    return _LogProbs.apply(hidden, weight, labels, temperatures, vocab_start, vocab_size, chunk_tokens, group)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        vocab_start: int,
        vocab_size: int,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rows = min(weight.shape[0], vocab_size - vocab_start)
        if rows <= 0:
            raise ValueError(f"this rank holds only padding rows (from {vocab_start} of a vocabulary of {vocab_size})")
        columns, is_local = _local_columns(labels, vocab_start, rows)
        largest, total, weighted, target = torch.empty(4, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = _scaled_logits(hidden[part], weight[:rows], temperatures[part])
            target[part] = logits.gather(1, columns[part, None]).squeeze(1)
            largest[part] = logits.amax(dim=1)
            logits -= largest[part, None]
            exponentials = logits.exp()
            total[part] = exponentials.sum(dim=1)
            weighted[part] = exponentials.mul_(logits).sum(dim=1)
        target.masked_fill_(~is_local, 0.0)
        if group is not None and group.size() > 1:
            merged = largest.clone()
            dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=group)
            shift = largest - merged
            scale = shift.exp()
            sums = torch.stack([scale * total, scale * (weighted + total * shift), target])
            dist.all_reduce(sums, group=group)
            largest, (total, weighted, target) = merged, sums
        log_total = total.log()
        log_normalizer = largest + log_total
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, columns, is_local, temperatures, log_normalizer)
        ctx.rows, ctx.chunk_tokens = rows, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        return target - log_normalizer, entropy

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, columns, is_local, temperatures, log_normalizer = ctx.saved_tensors
        rows = ctx.rows
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        # Prompt and padding tokens have no gradient: their logits are not computed again.
        for part in grad.nonzero().squeeze(1).split(ctx.chunk_tokens):
            logits = _scaled_logits(hidden[part], weight[:rows], temperatures[part])
            scaled = (grad[part] / temperatures[part])[:, None]
            grad_logits = logits.sub_(log_normalizer[part, None]).exp_().mul_(-scaled)
            grad_logits.scatter_add_(1, columns[part, None], scaled * is_local[part, None])
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = matmul_float32(grad_logits, weight[:rows]).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[:rows] += matmul_float32(grad_logits.t(), hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 6


def _scaled_logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    return matmul_float32(hidden, weight.t()).div_(temperatures[:, None])


def _local_columns(labels: Tensor, vocab_start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Column of each label among this rank's rows (0 where it lives on another rank), and whether it lives here."""
    columns = labels - vocab_start
    is_local = (columns >= 0) & (columns < rows)
    return columns.masked_fill(~is_local, 0), is_local
