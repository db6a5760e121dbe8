"""Offloaded activations are copies; parameters and small tensors are not moved; gradients are those without."""

import torch

from megatron_rl.models.layers.offload import SMALLEST, offloaded_activations


def test_activations_are_copied_and_parameters_are_not():
    weight = torch.nn.Parameter(torch.randn(40, 40))
    x = torch.randn(40, 40, requires_grad=True) * 1.0
    with offloaded_activations():
        product = x @ weight
    saved_x, saved_weight = product.grad_fn._saved_self, product.grad_fn._saved_mat2
    assert torch.equal(saved_x, x) and saved_x.data_ptr() != x.data_ptr()
    assert saved_weight.data_ptr() == weight.data_ptr()


def test_small_tensors_stay():
    x = torch.randn(SMALLEST - 1, requires_grad=True) * 1.0
    with offloaded_activations():
        y = x.sin()
    assert y.grad_fn._saved_self.data_ptr() == x.data_ptr()


def test_gradients_are_bit_identical():
    x, weight = torch.randn(64, 32), torch.randn(32, 48)
    gradients = []
    for context in (torch.enable_grad(), offloaded_activations()):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with context:
            loss = (torch.nn.functional.silu(a @ w) ** 2).sum()
        loss.backward()
        gradients.append((a.grad, w.grad))
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
