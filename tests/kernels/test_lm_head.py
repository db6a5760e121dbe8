"""The chunked log-prob head against dense float64 formulas."""

import pytest
import torch
from megatron_rl.kernels.lm_head.reference import log_probs_and_entropy
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode


def _inputs(tokens=37, hidden=16, rows=50, vocab=47):
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(tokens, hidden, generator=generator),
        "weight": torch.randn(rows, hidden, generator=generator),
        "labels": torch.cat([torch.tensor([0, vocab - 1]), torch.randint(0, vocab, (tokens - 2,), generator=generator)]),
        "temperatures": 0.3 + 2 * torch.rand(tokens, generator=generator),
        "upstream": torch.randn(tokens, generator=generator),
        "vocab": vocab,
    }


def _dense_float64(case):
    """Values and gradients by autograd on whole logits in float64, padding rows cut off."""
    hidden = case["hidden"].double().requires_grad_()
    weight = case["weight"].double().requires_grad_()
    logits = (hidden @ weight[: case["vocab"]].T) / case["temperatures"].double()[:, None]
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(1, case["labels"][:, None])[:, 0]
    (logprobs * case["upstream"].double()).sum().backward()
    entropy = -(distribution.exp() * distribution).sum(-1)
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def _chunked(case, chunk, dtype=torch.float32):
    hidden, weight = (case[name].clone().to(dtype).requires_grad_() for name in ("hidden", "weight"))
    logprobs, entropy = log_probs_and_entropy(
        hidden, weight, case["labels"], case["temperatures"], vocab_start=0, vocab_size=case["vocab"], chunk_tokens=chunk
    )
    (logprobs * case["upstream"]).sum().backward()
    return logprobs.detach(), entropy, hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 5, 37, 1000])
def test_values_and_gradients_equal_dense_float64(chunk):
    case = _inputs()
    for ours, exact in zip(_chunked(case, chunk), _dense_float64(case), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_hand_computed_values():
    # logits ln 1, ln 2, ln 4 at temperature 1: probabilities 1/7, 2/7, 4/7; the fourth row is padding.
    # At temperature 1/2 the logits double: 1/21, 4/21, 16/21.
    hidden = torch.ones(2, 1)
    weight = torch.tensor([[1.0], [2.0], [4.0], [100.0]]).log()
    logprobs, entropy = log_probs_and_entropy(
        hidden, weight, torch.tensor([2, 1]), torch.tensor([1.0, 0.5]), vocab_start=0, vocab_size=3, chunk_tokens=1
    )
    torch.testing.assert_close(logprobs, torch.tensor([4 / 7, 4 / 21]).log())
    p, q = torch.tensor([1, 2, 4]) / 7, torch.tensor([1, 4, 16]) / 21
    torch.testing.assert_close(entropy, torch.stack([-(p * p.log()).sum(), -(q * q.log()).sum()]))


def test_padding_rows_get_zero_gradient_whatever_they_hold():
    case = _inputs()
    clean = _chunked(case, 5)
    case["weight"][case["vocab"] :] = 1e4
    dirty = _chunked(case, 5)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    assert dirty[3][case["vocab"] :].abs().max() == 0


def test_tokens_without_upstream_gradient_add_nothing():
    case = _inputs()
    case["upstream"][::2] = 0.0
    for ours, exact in zip(_chunked(case, 5), _dense_float64(case), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    case["upstream"].zero_()
    assert all(gradient.abs().max() == 0 for gradient in _chunked(case, 5)[2:])


def test_entropy_carries_no_gradient():
    case = _inputs()
    _, entropy = log_probs_and_entropy(
        case["hidden"].requires_grad_(),
        case["weight"],
        case["labels"],
        case["temperatures"],
        vocab_start=0,
        vocab_size=case["vocab"],
        chunk_tokens=5,
    )
    assert not entropy.requires_grad


def test_huge_logits_stay_finite():
    case = _inputs()
    case["hidden"] *= 1e3
    logprobs, entropy, *gradients = _chunked(case, 5)
    exact = _dense_float64(case)
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=1e-4, atol=1e-2)
    assert all(torch.isfinite(tensor).all() for tensor in (logprobs, entropy, *gradients))


def test_bfloat16_inputs_keep_float32_logits():
    # Against float64 of the same rounded inputs: rounding logits to bfloat16 (8 bits) would give errors of 1e-2 and more.
    case = _inputs()
    rounded = case | {name: case[name].bfloat16().float() for name in ("hidden", "weight")}
    logprobs, entropy, *gradients = _chunked(case, 5, torch.bfloat16)
    exact = _dense_float64(rounded)
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=0, atol=1e-5)
    for ours, expected in zip(gradients, exact[2:], strict=True):
        assert (ours.double() - expected).norm() < 1e-2 * expected.norm()


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_grows_with_tokens_times_vocabulary():
    tokens, hidden, vocab, chunk = 512, 8, 1000, 16
    case = _inputs(tokens, hidden, vocab, vocab)
    with _LargestTensor() as seen:
        _chunked(case, chunk)
    # The largest are one chunk's logits, 16 x 1000; all logits would be 512 x 1000.
    assert seen.numel == chunk * vocab


@pytest.mark.ranks
def test_split_vocabulary_equals_dense_float64():
    reports = run_ranks(f"{__file__}:_two_ranks", 2)
    assert all(error < 1e-5 for report in reports for error in report.values()), reports


def _two_ranks(_):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    case = _inputs()  # 50 rows: 25 on each rank, 47 real, so the last 3 of rank 1 are padding
    hidden = case["hidden"].clone().requires_grad_()
    weight = case["weight"].chunk(2)[rank].clone().requires_grad_()
    logprobs, entropy = log_probs_and_entropy(
        hidden,
        weight,
        case["labels"],
        case["temperatures"],
        vocab_start=25 * rank,
        vocab_size=case["vocab"],
        chunk_tokens=7,
        group=group,
    )
    (logprobs * case["upstream"]).sum().backward()
    dist.all_reduce(hidden.grad)
    exact = _dense_float64(case)
    pairs = {
        "logprobs": (logprobs.detach(), exact[0]),
        "entropy": (entropy, exact[1]),
        "hidden": (hidden.grad, exact[2]),
        "weight": (weight.grad, exact[3].chunk(2)[rank]),
    }
    dist.destroy_process_group()
    return {name: ((ours - expected).abs().max() / expected.abs().max()).item() for name, (ours, expected) in pairs.items()}
