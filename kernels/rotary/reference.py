"""Rotary position embedding from cosines and sines that were computed once for all layers.

Each pair (a, b) of a head turns by its token's angle: (a cos - b sin, b cos + a sin). The backward turns by the opposite angle.
Half-split pairs are (i, i + r / 2) of the first r dimensions; interleaved pairs are (2 i, 2 i + 1). Dimensions past r pass through.
Source: Su et al., arXiv:2104.09864; the half-split order is GPT-NeoX's.
"""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """[t, ..., d] -> the same shape and type, contiguous.

    Args:
        cos, sin: [t, r / 2] of x's type, r <= d: a row per token, so positions may restart, and a rank may hold any tokens.
        interleaved: which dimensions make a pair (above).
    """
    return _Rotate.apply(x, cos, sin, interleaved)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _turn(grad, *ctx.saved_tensors, ctx.interleaved, -1), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: int) -> Tensor:
    cos, sin = (table.view(table.shape[0], *(1,) * (x.dim() - 2), table.shape[1]) for table in (cos, sin))
    rotary_dim = 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    a, b = _pairs(x, rotary_dim, interleaved)
    out_a, out_b = _pairs(out, rotary_dim, interleaved)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=direction)
    out[..., rotary_dim:] = x[..., rotary_dim:]
    return out


def _pairs(x: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
