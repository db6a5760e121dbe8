"""RMSNorm over the last dimension, with its closed-form backward: autograd's own keeps and walks several tensors of the input's size.

y = x * r * w,     r = 1 / sqrt(mean(x^2) + eps)                                  (Zhang and Sennrich, arXiv:1910.07467)
d w = sum over rows of dy * x * r,     d x = r * dy * w - x * r^3 / n * sum_j(dy_j * x_j * w_j)
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., n] and [n] -> [..., n] of x's type, computed in float32 at least. Kept for the backward: x and one number per row."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _widen(x)
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, wide_grad, wide_weight = _widen(x), _widen(grad), _widen(weight)
        product = torch.empty(x.shape, dtype=wide.dtype, device=x.device)
        rows = torch.mul(wide, wide_grad, out=product).flatten(0, -2)
        grad_weight = scale.flatten() @ rows
        along_x = (rows @ wide_weight).view(scale.shape).mul_(scale.pow(3)).div_(x.shape[-1])
        grad_x = torch.mul(wide_grad, wide_weight, out=product).mul_(scale).addcmul_(wide, along_x, value=-1)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
