"""silu(gate) * up of a fused [gate | up] projection, with a backward that needs no concatenation.

d up = dy * silu(gate),     d gate = dy * up * silu'(gate)
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f], of the same type. Only the input is kept for the backward."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        # Both halves are computed where they stay: a buffer of this size is fresh memory each time, and costs more than the arithmetic.
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, up, out=grad_gate), gate, grad_input=grad_gate)
        return grad_gate_up
