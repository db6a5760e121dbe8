"""The load-balancing loss is DeepSeek-V3's, and neither it nor its gradient depends on how the step was cut up.

The oracle is transformers in float64, one forward per document, with the loss written out by hand from the routers' inputs.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny_models import write_glm4_moe, write_qwen3_moe

from megatron_rl.transports.batches.filesystem import write_batch
from megatron_rl.transports.batches.packing import pack
from megatron_rl.transports.batches.records import StepBatch, TrainingSample

pytestmark = pytest.mark.ranks

LENGTHS, COEFFICIENT = (21, 7, 30, 14, 25, 11, 18, 30), 10.0  # so large that the gradient is mostly this loss's
CAPACITIES = {1: 156, 2: 90, 4: 50}
BALANCED = {"train_router": True, "aux_loss_coefficient": COEFFICIENT}
ONE = {
    "micro_1": {"batches": "batches_1"},
    "micro_2": {"batches": "batches_2"},
    "micro_4": {"batches": "batches_4"},
    "recomputed": {"batches": "batches_4", "recompute": "full"},
    "softmax": {"batches": "batches_2", "model": "softmax"},
}
TWO = {
    "tensor": {"parallel": {"tensor_parallel": 2}},
    "context": {"parallel": {"context_parallel": 2}},
    "data": {"parallel": {"data_parallel": 2}},
    "expert": {"parallel": {"data_parallel": 2, "expert_parallel": 2}},
    "tensor_expert": {"parallel": {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}},
    "pipeline": {"parallel": {"pipeline_parallel": 2}},
}


def documents() -> list[TrainingSample]:
    rng = np.random.default_rng(5)
    streams = [{"token_ids": rng.integers(0, 259, n), "ce_weights": np.arange(n) > 0} for n in LENGTHS]
    return [TrainingSample(f"{i}", f"{i}", document) for i, document in enumerate(streams)]


def oracle(model: torch.nn.Module, score: str, topk: int) -> tuple[float, float]:
    """Load-balancing loss, and the gradient norm of it and the cross-entropy together."""
    model.set_experts_implementation("eager")  # the others know no float64
    model, balance, loss = model.double(), 0.0, 0.0
    inputs: list[tuple[torch.nn.Module, torch.Tensor]] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda module, args, _: inputs.append((module, args[0])))
    for length, document in zip(LENGTHS, documents(), strict=True):
        inputs.clear()
        ids = torch.from_numpy(document.streams["token_ids"]).long()
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])
        loss = loss - logp.sum() / sum(n - 1 for n in LENGTHS)
        for gate, x in inputs:
            logits = x.reshape(length, -1).double() @ gate.weight.t()
            s = torch.sigmoid(logits) if score == "sigmoid" else logits.softmax(-1)
            s = s / s.sum(-1, keepdim=True)
            experts = s.shape[1]
            for i in range(experts):
                chosen = sum(i in row for row in s.topk(topk, -1).indices.tolist())
                balance = balance + COEFFICIENT / len(LENGTHS) * (experts / (topk * length) * chosen) * s[:, i].mean()
    (loss + balance).backward()
    return float(balance.detach()), math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("balance")


@pytest.fixture(scope="module")
def expected(work) -> dict[str, tuple[float, float]]:
    sigmoid = write_glm4_moe(work / "model", max_position_embeddings=64)
    softmax = write_qwen3_moe(work / "softmax", max_position_embeddings=64)
    return {"micro_1": oracle(sigmoid, "sigmoid", 3), "softmax": oracle(softmax, "softmax", 2)}


@pytest.fixture(scope="module")
def lines(work: Path, expected) -> dict[str, dict]:
    """The metrics of step 1, by case."""
    for count, capacity in CAPACITIES.items():
        (work / f"batches_{count}").mkdir()
        micro_batches = pack(documents(), 1, 0, capacity=capacity, data_parallel=1)
        assert len(micro_batches) == count
        write_batch(work / f"batches_{count}", StepBatch(1, 0, micro_batches))
    cases = {name: {"batches": "batches_2", "steps": 1, "moe": BALANCED} | case for name, case in (ONE | TWO).items()}
    (work / "layouts.json").write_text(json.dumps(cases))
    one = run_ranks("tests/trainer/layout_cases.py:main", 1, [str(work), *ONE])[0]
    two = run_ranks("tests/trainer/layout_cases.py:main", 2, [str(work), *TWO])[0]
    return {name: metrics[0] for name, metrics in (one | two).items()}


@pytest.mark.parametrize("case", ["micro_1", "softmax"])
def test_loss_and_gradient_follow_the_formula(lines, expected, case):
    balance, norm = expected[case]
    assert lines[case]["moe/aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert lines[case]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("case", [name for name in ONE | TWO if name not in ("micro_1", "softmax")])
def test_neither_depends_on_how_the_step_was_cut_up(lines, case):
    for key in ("moe/aux_loss", "grad_norm", "loss/total"):
        assert lines[case][key] == pytest.approx(lines["micro_1"][key], rel=1e-6), key
