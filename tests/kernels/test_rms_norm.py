"""RMSNorm against its formula in float64, values and gradients."""

import torch
from megatron_rl.kernels.rms_norm.reference import rms_norm

EPS = 1e-2
"""Large enough to show in the result."""


def _expected(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = weight * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    (y * grad).sum().backward()
    return y.detach(), x.grad, weight.grad


def _ours(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = rms_norm(x, weight, EPS)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


def test_values_and_gradients_follow_the_formula():
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((5, 3, 14), (14,), (5, 3, 14)))
    for ours, expected in zip(_ours(x, weight, grad), _expected(x, weight, grad), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_slices_and_transposed_gradients_are_read_as_they_lie():
    generator = torch.Generator().manual_seed(1)
    projection = torch.randn(6, 1, 2, 5, 8, generator=generator)
    x, weight = projection[..., :3, :], torch.randn(8, generator=generator)
    grad = torch.randn(3, 2, 1, 6, 8, generator=generator).permute(3, 2, 1, 0, 4)
    assert not x.is_contiguous() and not grad.is_contiguous()
    for ours, expected in zip(_ours(x, weight, grad), _expected(x, weight, grad), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    generator = torch.Generator().manual_seed(2)
    x, weight, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 32), (32,), (7, 32)))
    ours, expected = _ours(x, weight, grad), _expected(x, weight, grad)
    assert {tensor.dtype for tensor in ours} == {torch.bfloat16}
    assert torch.equal(ours[0], expected[0].bfloat16())
    for mine, exact in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2**-8, atol=1e-3)


def test_a_row_of_zeros_has_finite_gradients():
    y, grad_x, grad_weight = _ours(torch.zeros(2, 4), torch.full((4,), 3.0), torch.ones(2, 4))
    assert torch.equal(y, torch.zeros(2, 4)) and torch.equal(grad_weight, torch.zeros(4))
    # r = 1 / sqrt(eps) = 10, and the mean square does not move at 0.
    torch.testing.assert_close(grad_x, torch.full((2, 4), 30.0))
