"""One step's loss and gradient do not depend on the layout: real gloo ranks replay the same batches and agree with HF.

The oracle is transformers in fp32, one forward per document, with IPO written out by hand.
"""

import json
import math

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny_models import write_qwen3

from megatron_rl.transports.batches.filesystem import write_batch
from megatron_rl.transports.batches.packing import pack
from megatron_rl.transports.batches.records import StepBatch, TrainingSample

STEPS, LENGTHS, TEMPERATURE, EPS = 2, (5, 19, 8, 33, 12, 2, 27, 16), 0.8, 0.3
LAYOUTS = {
    "one": {},
    "recomputed": {"recompute": "full", "head_chunk_tokens": 7},
    "tensor": {"parallel": {"tensor_parallel": 2}},
    "data": {"parallel": {"data_parallel": 2}},
    "pipeline": {"parallel": {"pipeline_parallel": 2}},
    "context": {"parallel": {"context_parallel": 2}},
}
RESUMED = {  # saved after step 1 by another layout; the model is tied, so a pipeline keeps two copies of its embedding
    "data_from_tensor": {"parallel": {"data_parallel": 2}, "resume_from": "tensor/checkpoints/step_1"},
    "pipeline_from_data": {"parallel": {"pipeline_parallel": 2}, "resume_from": "data/checkpoints/step_1"},
    "tensor_from_pipeline": {"parallel": {"tensor_parallel": 2}, "resume_from": "pipeline/checkpoints/step_1"},
}
FOUR = {
    "tensor_pipeline": {"parallel": {"tensor_parallel": 2, "pipeline_parallel": 2}},
    "tensor_data": {"parallel": {"tensor_parallel": 2, "data_parallel": 2}},
}


def samples(model, step: int) -> list[TrainingSample]:
    """Documents with prompts; inference log-probs are the model's own with noise, so that ratios differ from 1 and some are masked."""
    rng = np.random.default_rng(step)
    made = []
    for i, length in enumerate(LENGTHS):
        tokens = rng.integers(0, 259, length).astype(np.int32)
        mask = np.arange(length) >= max(1, length // 3)
        logprobs = document_logprobs(model, tokens).detach().numpy()
        noisy = np.where(mask, logprobs + rng.normal(0, 0.5, length), 0).astype(np.float32)
        noisy[np.flatnonzero(mask)[0]] = -0.05  # far above the model's: beyond IPO's trust region
        streams = {"token_ids": tokens, "loss_mask": mask, "inference_logprobs": noisy}
        streams |= {"temperatures": np.full(length, TEMPERATURE), "advantages": np.where(mask, rng.normal(), 0)}
        made.append(TrainingSample(f"{step}/{i}", f"{step}/{i}", streams))
    return made


def document_logprobs(model, tokens: np.ndarray) -> torch.Tensor:
    """log p of each token given those before it, at TEMPERATURE; 0 for the first."""
    ids = torch.from_numpy(tokens).long()
    logits = model(ids[None]).logits[0, :-1].float() / TEMPERATURE
    return torch.cat([torch.zeros(1), torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]])


def oracle(model, documents: list[TrainingSample]) -> tuple[float, float]:
    """Loss and gradient norm of the step, document by document."""
    model.zero_grad()
    count = sum(int(d.streams["loss_mask"].sum()) for d in documents)
    total = 0.0
    for document in documents:
        mask = torch.from_numpy(document.streams["loss_mask"])
        logp = document_logprobs(model, document.streams["token_ids"])[mask]
        logq = torch.from_numpy(document.streams["inference_logprobs"])[mask]
        keep = (logp.exp() - logq.exp()).abs() <= EPS
        advantage = torch.from_numpy(document.streams["advantages"])[mask]
        loss = -(advantage * (logp - logq).exp())[keep].sum() / count
        loss.backward()
        total += loss.item()
    return total, math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def expected(work):
    """Prepare model and batches; the oracle's numbers of step 1."""
    model = write_qwen3(work / "model", tied=True).eval()
    (work / "batches").mkdir()
    first = samples(model, 1)
    for step in range(1, STEPS + 1):
        documents = first if step == 1 else samples(model, step)
        write_batch(work / "batches", StepBatch(step, step - 1, pack(documents, step, step - 1, capacity=64, data_parallel=1)))
    (work / "layouts.json").write_text(json.dumps(LAYOUTS | FOUR | RESUMED))
    return oracle(model, first)


@pytest.fixture(scope="module")
def one(work, expected):
    return run_ranks("tests/trainer/layout_cases.py:main", 1, [str(work), "one", "recomputed"])[0]


@pytest.fixture(scope="module")
def two(work, one):
    return run_ranks("tests/trainer/layout_cases.py:main", 2, [str(work), "tensor", "data", "pipeline", "context", *RESUMED])[0]


@pytest.mark.ranks
def test_one_rank_equals_hf(expected, one):
    loss, norm = expected
    step = one["one"][0]
    assert step["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert 0 < step["is_masked"] < 0.5 and step["tokens/trained"] == sum(n - max(1, n // 3) for n in LENGTHS)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["recomputed", "tensor", "data", "pipeline", "context"])
def test_loss_and_gradient_norm_do_not_depend_on_the_layout(one, two, layout):
    lines = (one | two)[layout]
    assert len(lines) == STEPS
    for line, reference in zip(lines, one["one"], strict=True):
        # step 2 follows an Adam step, which amplifies rounding of near-zero gradients
        tolerance = 1e-5 if line["step"] == 1 else 1e-3
        for key in ("loss/total", "grad_norm", "entropy/mean", "mismatch_kl/mean", "is_masked", "tokens/trained"):
            assert line[key] == pytest.approx(reference[key], rel=tolerance, abs=1e-7), (layout, line["step"], key)


@pytest.mark.ranks
@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_resumes_at_another_layout(one, two, case):
    (resumed,) = two[case]
    assert resumed["step"] == 2
    for key in ("loss/total", "grad_norm", "entropy/mean"):
        assert resumed[key] == pytest.approx(one["one"][1][key], rel=1e-3), key


@pytest.mark.ranks
def test_four_ranks_agree_with_one(work, one):
    four = run_ranks("tests/trainer/layout_cases.py:main", 4, [str(work), *FOUR])[0]
    for layout, lines in four.items():
        for key in ("loss/total", "grad_norm"):
            assert lines[0][key] == pytest.approx(one["one"][0][key], rel=1e-5), (layout, key)
