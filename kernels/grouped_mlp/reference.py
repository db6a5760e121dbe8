"""The SwiGLU MLPs of several experts over tokens sorted by expert, as one autograd function.

For a token x of expert e with routing weight p, [gate | up] = W1_e x and
    y = W2_e a,     a = p s up,     s = silu(gate)
and with dy given, b = W2_e^T dy:
    dp = sum(b s up),     d up = p b s,     d gate = p b up silu'(gate)
    dx = W1_e^T [d gate | d up],     dW1_e = [d gate | d up] x^T,     dW2_e = dy a^T

Only x and [gate | up] are kept; the rest is computed again, expert by expert, in buffers that stay in the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.platform import matmul_float32


def grouped_mlp(tokens: Tensor, probs: Tensor, counts: Sequence[int], fc1: Sequence[Tensor], fc2: Sequence[Tensor]) -> Tensor:
    """Apply each expert to its tokens.

    Args:
        tokens: [n, h], those of expert 0 first, then those of expert 1, ...
        probs: [n] float, each token's routing weight; multiplied in float32 at least.
        counts: tokens of each expert, n in sum; 0 is fine.
        fc1: one [2 f, h] per expert, gate rows above up rows.
        fc2: one [h, f] per expert.

    Returns:
        [n, h] of the type of `tokens`. A weight with a float32 `main_grad` (Megatron's gradient buffer) has its gradient added there,
        is marked `grad_added_to_main_grad`, and gets a `grad` without meaning, as with Megatron's fused gradient accumulation.
    """
    return _GroupedMLP.apply(tokens, probs, list(counts), *fc1, *fc2)


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tokens: Tensor, probs: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        fc1, fc2 = weights[: len(counts)], weights[len(counts) :]
        gate_up = tokens.new_empty(tokens.shape[0], fc1[0].shape[0])
        out = torch.empty_like(tokens)
        hidden = tokens.new_empty(max(counts), fc2[0].shape[1])
        parts = zip(*(tensor.split(counts) for tensor in (tokens, probs[:, None], gate_up, out)), fc1, fc2, strict=True)
        for x, p, projected, y, w1, w2 in parts:
            if len(x):
                torch.mm(x, w1.t(), out=projected)
                gate, up = projected.chunk(2, dim=-1)
                a = torch.ops.aten.silu.out(gate, out=hidden[: len(x)]).mul_(up).mul_(p)
                torch.mm(a, w2.t(), out=y)
        ctx.counts = counts
        ctx.save_for_backward(tokens, probs, gate_up, *weights)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, probs, gate_up, *weights = ctx.saved_tensors
        counts, experts = ctx.counts, len(ctx.counts)
        grad_tokens, grad_probs = torch.empty_like(tokens), torch.empty_like(probs)
        grad_weights: list[Tensor | None] = [None] * len(weights)
        buffers = [tokens.new_empty(max(counts), width) for width in (gate_up.shape[1] // 2, gate_up.shape[1] // 2, gate_up.shape[1])]
        parts = zip(*(tensor.split(counts) for tensor in (tokens, probs[:, None], gate_up, grad, grad_tokens, grad_probs)), strict=True)
        for e, (x, p, projected, dy, dx, dp) in enumerate(parts):
            gate, up = projected.chunk(2, dim=-1)
            b, a, d_projected = (buffer[: len(x)] for buffer in buffers)
            d_gate, d_up = d_projected.chunk(2, dim=-1)
            if len(x):
                torch.mm(dy, weights[experts + e], out=b)
                torch.ops.aten.silu.out(gate, out=a)
                torch.mul(b, a, out=d_up)
                torch.sum(d_up * up, dim=-1, dtype=dp.dtype, out=dp)
                d_up.mul_(p)
                a.mul_(up).mul_(p)
                torch.ops.aten.silu_backward.grad_input(b.mul_(up).mul_(p), gate, grad_input=d_gate)
                torch.mm(d_projected, weights[e], out=dx)
            grad_weights[e] = _weight_gradient(weights[e], d_projected, x) if ctx.needs_input_grad[3 + e] else None
            grad_weights[experts + e] = _weight_gradient(weights[experts + e], dy, a) if ctx.needs_input_grad[3 + experts + e] else None
        return grad_tokens, grad_probs, None, *grad_weights


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x, or where Megatron keeps gradients, an empty tensor after having added it there."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return torch.mm(grad.t(), x)
    if len(x) and x.dtype == main_grad.dtype:
        main_grad.addmm_(grad.t(), x)
    elif len(x):
        main_grad.add_(matmul_float32(grad.t(), x))
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
