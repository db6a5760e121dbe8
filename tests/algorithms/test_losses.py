"""Values and gradients against worked numbers (data/golden_losses.json), and the corners of float32."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms import build_loss
from megatron_rl.algorithms.losses.ratio import capped_ratio, k3, probability_gap

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden_losses.json").read_text())
TOKENS = {name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["tokens"].items()}


def run(loss, logp, logq, advantages, mask=None):
    """Per-token loss, metrics, and d(sum of losses)/d logp."""
    logp = torch.as_tensor(logp).clone().requires_grad_()
    mask = torch.ones(len(logp), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    values, metrics = loss(logp, torch.as_tensor(logq), torch.as_tensor(advantages), mask)
    (gradient,) = torch.autograd.grad(values.sum(), logp)
    return values.detach(), metrics, gradient


def golden(eps):
    return run(build_loss("ipo", eps=eps), TOKENS["pi"].log(), TOKENS["mu"].log(), TOKENS["A"])


def test_ipo_keeps_and_drops_the_golden_tokens_with_their_gradients():
    expected = GOLDEN["losses"]["ipo_eps_0.3"]
    values, metrics, gradient = golden(0.3)
    assert [1 - int(m) for m in metrics["is_masked"]] == expected["keep"]
    torch.testing.assert_close(gradient, torch.tensor(expected["dlogpi"], dtype=torch.float64), rtol=0, atol=1e-8)
    # the loss of a kept token is -A r
    ratio = torch.tensor(GOLDEN["ratio"], dtype=torch.float64)
    torch.testing.assert_close(values, -TOKENS["A"] * ratio * torch.tensor(expected["keep"]), rtol=0, atol=1e-8)


def test_a_region_without_bounds_is_the_importance_weighted_gradient():
    _, metrics, gradient = golden(1.0)
    assert not metrics["is_masked"].any()
    torch.testing.assert_close(
        gradient, torch.tensor(GOLDEN["losses"]["policy_gradient_is"]["dlogpi"], dtype=torch.float64), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("token", GOLDEN["separating_tokens"])
def test_the_region_is_on_probabilities_and_two_sided(token):
    p, q, a = (torch.tensor([token[k]], dtype=torch.float64) for k in ("pi", "mu", "A"))
    for eps in (0.3, 0.1):
        if f"ipo_eps_{eps}" in token:
            _, metrics, gradient = run(build_loss("ipo", eps=eps), p.log(), q.log(), a)
            assert ("drop" if metrics["is_masked"][0] else "keep") == token[f"ipo_eps_{eps}"]
            assert (gradient[0] == 0) == bool(metrics["is_masked"][0])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_bound_itself_is_kept(advantage):
    for gap, masked in ((0.25, 0.0), (0.2501, 1.0)):
        p, q = torch.tensor([0.5 + gap], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
        for logp, logq in ((p.log(), q.log()), (q.log(), p.log())):
            _, metrics, _ = run(build_loss("ipo", eps=0.25 + 1e-12), logp, logq, torch.tensor([advantage], dtype=torch.float64))
            assert metrics["is_masked"].item() == masked


def test_the_gradient_agrees_with_finite_differences():
    loss, step = build_loss("ipo"), 1e-6
    logp, logq, a = TOKENS["pi"].log(), TOKENS["mu"].log(), TOKENS["A"]
    mask = torch.ones(6, dtype=torch.bool)
    _, _, gradient = run(loss, logp, logq, a)
    for i in range(6):
        shift = torch.zeros(6, dtype=torch.float64)
        shift[i] = step
        slope = (loss(logp + shift, logq, a, mask)[0].sum() - loss(logp - shift, logq, a, mask)[0].sum()) / (2 * step)
        assert slope.item() == pytest.approx(gradient[i].item(), abs=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("mu", [1e-38, 0.5])
def test_huge_log_ratios_and_tiny_probabilities_stay_finite(mu, log_ratio, advantage):
    logq = torch.tensor([math.log(mu)] * 2, dtype=torch.float32)
    logp = logq + torch.tensor([log_ratio, 0.0])
    values, metrics, gradient = run(build_loss("ipo"), logp, logq, torch.tensor([advantage] * 2))
    assert values.isfinite().all() and gradient.isfinite().all()
    assert values[1].item() == pytest.approx(-advantage) and gradient[1].item() == pytest.approx(-advantage)
    if metrics["is_masked"][0]:
        assert values[0] == 0 and gradient[0] == 0


def test_inside_the_region_a_huge_ratio_is_capped_and_keeps_the_caps_gradient():
    """q = 1e-8, p = 0.25: |p - q| passes eps 0.3 with r = 2.5e7."""
    logp, logq = torch.tensor([math.log(0.25)]), torch.tensor([math.log(1e-8)])
    values, metrics, gradient = run(build_loss("ipo"), logp, logq, torch.tensor([2.0]))
    assert metrics["is_masked"].item() == 0
    assert values.item() == pytest.approx(-2e4) and gradient.item() == pytest.approx(-2e4)


def test_tokens_off_the_mask_contribute_nothing_whatever_they_hold():
    logp = torch.tensor([-1.0, 100.0, float("inf"), -1.0])
    logq = torch.tensor([-1.0, -100.0, 0.0, -1.0])
    values, metrics, gradient = run(build_loss("ipo"), logp, logq, torch.tensor([1.0, 5.0, 5.0, -1.0]), [1, 0, 0, 1])
    assert values.tolist() == [-1.0, 0.0, 0.0, 1.0]
    assert gradient.tolist() == [-1.0, 0.0, 0.0, 1.0]
    assert metrics["is_masked"].tolist() == [0.0] * 4


def test_an_empty_mask_gives_zero_with_a_gradient():
    values, _, gradient = run(build_loss("ipo"), torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -9.0]), torch.ones(2), [0, 0])
    assert values.tolist() == [0.0, 0.0] and gradient.tolist() == [0.0, 0.0]


def test_k3_is_the_golden_mean_and_never_negative():
    log_ratio = TOKENS["pi"].log() - TOKENS["mu"].log()
    assert k3(log_ratio).mean().item() == pytest.approx(GOLDEN["k3_mean"], abs=1e-5)
    assert (k3(torch.linspace(-30, 30, 601, dtype=torch.float64)) >= 0).all()


def test_the_probability_gap_does_not_cancel():
    """Two probabilities 1e-10 apart near 1: a difference of two float32 exponentials would be 0."""
    logp, logq = torch.tensor([-1e-10]), torch.tensor([-2e-10])
    assert probability_gap(logp, logq).item() == pytest.approx(1e-10, rel=1e-5)
    assert probability_gap(logq, logp).item() == pytest.approx(1e-10, rel=1e-5)


def test_the_capped_ratio_below_its_cap_is_the_ratio():
    x = torch.tensor([0.5, -3.0], dtype=torch.float64, requires_grad=True)
    y = capped_ratio(x, math.log(10.0))
    torch.testing.assert_close(y, x.exp())
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.detach().exp())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ipp", {}, "unknown loss 'ipp'; known: "),
        ("ipo", {"epsilon": 0.1}, "loss 'ipo' has no option 'epsilon'; it has: eps, max_ratio"),
        ("ipo", {"eps": 0.0}, "eps = 0.0; it must be positive"),
    ],
)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_loss(name, **options)
