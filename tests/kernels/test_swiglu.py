"""SwiGLU against its formula in float64, values and gradients."""

import torch
from megatron_rl.kernels.swiglu.reference import swiglu


def test_values_and_gradients_follow_the_formula():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 14, generator=generator) * 4
    weight = torch.randn(3, 5, 7, generator=generator)
    exact = x.double().requires_grad_()
    gate, up = exact[..., :7], exact[..., 7:]
    expected = gate / (1 + torch.exp(-gate)) * up
    (expected * weight).sum().backward()
    ours = x.clone().requires_grad_()
    out = swiglu(ours)
    (out * weight).sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_extreme_gates_stay_finite():
    x = torch.tensor([[200.0, -200.0, 1.0, 1.0]], requires_grad=True)
    out = swiglu(x)
    out.sum().backward()
    assert torch.equal(out, torch.tensor([[200.0, -0.0]])) and torch.isfinite(x.grad).all()


def test_bfloat16_keeps_its_type():
    x = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    swiglu(x).sum().backward()
    assert swiglu(x).dtype == x.grad.dtype == torch.bfloat16
