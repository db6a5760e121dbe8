"""Grouped experts against their formula in float64, expert by expert with autograd."""

import pytest
import torch
from megatron_rl.kernels.grouped_mlp.reference import grouped_mlp

COUNTS, HIDDEN, INNER = (3, 0, 5, 1), 6, 4


def made(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """tokens, routing weights, fc1 and fc2 of every expert."""
    generator = torch.Generator().manual_seed(0)
    n = sum(COUNTS)
    shapes = [(n, HIDDEN), (n,), *[(2 * INNER, HIDDEN)] * len(COUNTS), *[(HIDDEN, INNER)] * len(COUNTS)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor.to(torch.float32 if i == 1 else dtype).requires_grad_() for i, tensor in enumerate(tensors)]


def ours(inputs: list[torch.Tensor]) -> torch.Tensor:
    tokens, probs, *weights = inputs
    return grouped_mlp(tokens, probs, COUNTS, weights[: len(COUNTS)], weights[len(COUNTS) :])


def by_formula(inputs: list[torch.Tensor]) -> torch.Tensor:
    tokens, probs, *weights = inputs
    out, start = [], 0
    for expert, count in enumerate(COUNTS):
        x, p = tokens[start : start + count], probs[start : start + count, None]
        gate, up = (x @ weights[expert].t()).split(INNER, dim=1)
        out.append((p * gate * torch.sigmoid(gate) * up) @ weights[len(COUNTS) + expert].t())
        start += count
    return torch.cat(out)


def test_values_and_gradients_follow_the_formula():
    inputs = made()
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    weights = torch.linspace(-1, 1, sum(COUNTS) * HIDDEN, dtype=torch.float64).view(-1, HIDDEN)
    expected, out = by_formula(exact), ours(inputs)
    (expected * weights).sum().backward()
    (out * weights.float()).sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for tensor, reference in zip(inputs, exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)
    assert not inputs[3].grad.any()  # the expert without tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_to_megatrons_buffers(dtype):
    inputs, plain = made(dtype), made(dtype)
    for weight in inputs[2:]:
        weight.main_grad = torch.ones(weight.shape)
    for tensors in (inputs, plain):
        ours(tensors).sum().backward()
    for weight, expected in zip(inputs[2:], plain[2:], strict=True):
        assert weight.grad_added_to_main_grad
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(weight.main_grad - 1, expected.grad.float(), rtol=tolerance, atol=tolerance)
    for a, b in zip(inputs[:2], plain[:2], strict=True):
        assert torch.equal(a.grad, b.grad)


def test_frozen_weights_get_no_gradient():
    inputs = made()
    for weight in inputs[2:]:
        weight.requires_grad_(False)
    ours(inputs).sum().backward()
    assert inputs[0].grad is not None and all(weight.grad is None for weight in inputs[2:])


def test_no_token_at_all():
    tokens, probs, *weights = made()
    out = grouped_mlp(tokens[:0], probs[:0], [0] * len(COUNTS), weights[: len(COUNTS)], weights[len(COUNTS) :])
    out.sum().backward()
    assert out.shape == (0, HIDDEN) and not any(weight.grad.any() for weight in weights)


def test_bfloat16_follows_float32():
    inputs = made(torch.bfloat16)
    out = ours(inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), by_formula([tensor.detach().float() for tensor in inputs]), rtol=2e-2, atol=6e-2)
