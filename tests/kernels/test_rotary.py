"""Rotary embedding against the complex numbers it is: each pair times exp(i * angle)."""

import math

import pytest
import torch
from megatron_rl.kernels.rotary.reference import rotate

HEAD_DIM, ROTARY_DIM, TOKENS = 10, 6, 4
PAIRS = {False: [(0, 3), (1, 4), (2, 5)], True: [(0, 1), (2, 3), (4, 5)]}
"""Dimensions of each pair by `interleaved`."""


def _expected(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    out = x.double().clone()
    for number, (a, b) in enumerate(PAIRS[interleaved]):
        turn = torch.polar(torch.ones(TOKENS, dtype=torch.float64), angles[:, number].double())
        turned = torch.complex(x[..., a].double(), x[..., b].double()) * turn.view(TOKENS, *(1,) * (x.dim() - 2))
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_pairs_turn_by_the_angle_and_gradients_turn_back(interleaved):
    generator = torch.Generator().manual_seed(0)
    # A slice of a fused projection, [t, b, groups, heads, d].
    x = torch.randn(TOKENS, 1, 2, 5, HEAD_DIM, generator=generator)[..., :3, :].requires_grad_()
    angles = torch.randn(TOKENS, ROTARY_DIM // 2, generator=generator) * 3
    grad = torch.randn(x.shape, generator=generator)
    out = rotate(x, angles.cos(), angles.sin(), interleaved)
    (gradient,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(out.double(), _expected(x.detach(), angles, interleaved), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), _expected(grad, -angles, interleaved), rtol=1e-6, atol=1e-6)
    assert out.is_contiguous()


def test_dimensions_past_the_rotary_ones_pass_through_bit_for_bit():
    x = torch.randn(TOKENS, 2, HEAD_DIM)
    out = rotate(x, torch.rand(TOKENS, ROTARY_DIM // 2), torch.rand(TOKENS, ROTARY_DIM // 2))
    assert torch.equal(out[..., ROTARY_DIM:], x[..., ROTARY_DIM:])


def test_a_quarter_turn_by_hand():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
    # (a, b) -> (-b, a): pairs (1, 3), (2, 4), or (1, 2), (3, 4).
    assert rotate(x, cos, sin).tolist() == [[-3.0, -4.0, 1.0, 2.0]]
    assert rotate(x, cos, sin, interleaved=True).tolist() == [[-2.0, 1.0, -4.0, 3.0]]


def test_bfloat16_keeps_its_type():
    x = torch.randn(3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    angle = torch.full((3, 4), math.pi / 3, dtype=torch.bfloat16)
    out = rotate(x, angle.cos(), angle.sin())
    out.sum().backward()
    assert out.dtype == x.grad.dtype == torch.bfloat16
