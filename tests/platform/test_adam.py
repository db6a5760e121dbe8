"""Our AdamW against torch's."""

import copy

import torch

from megatron_rl.platform.adam import FusedAdam


def _train(optimizer, parameter, steps=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_steps_equal_torch_adamw():
    start = [torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), torch.ones(5)]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
    _train(FusedAdam(ours, **options), ours[0])
    _train(torch.optim.AdamW(theirs, **options), theirs[0])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)
    assert torch.equal(ours[1], start[1])


def test_l2_mode_equals_torch_adam():
    ours, theirs = torch.ones(6), torch.ones(6)
    _train(FusedAdam([ours], lr=0.01, weight_decay=0.1, adam_w_mode=False), ours)
    _train(torch.optim.Adam([theirs], lr=0.01, weight_decay=0.1), theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_step_lives_in_the_group_and_moments_in_the_state():
    parameter = torch.ones(4)
    optimizer = FusedAdam([parameter], lr=0.1)
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert optimizer.state[parameter].keys() == {"exp_avg", "exp_avg_sq"}
    resumed = FusedAdam([parameter], lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["step"] == 2
