"""A step's gradient is a sum over its tokens: how they are cut into micro-batches, data-parallel ranks and expert ranks changes nothing."""

import json

import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import write_glm4_moe

from megatron_rl.transports.batches.filesystem import write_batch
from megatron_rl.transports.batches.packing import pack
from megatron_rl.transports.batches.records import StepBatch, TrainingSample

pytestmark = pytest.mark.ranks

LENGTHS = (21, 7, 30, 14, 25, 11, 18, 30)
CAPACITIES = {1: 156, 2: 90, 4: 50}
"""Tokens of a micro-batch, by how many micro-batches they make of LENGTHS (156 tokens)."""
EP2 = {"expert_parallel": 2}
ONE = {f"micro_{count}": {"batches": f"batches_{count}"} for count in CAPACITIES}
TWO = {
    "data_2": {"batches": "batches_2", "parallel": {"data_parallel": 2}},
    "data_4": {"batches": "batches_4", "parallel": {"data_parallel": 2}},
    "expert_2": {"batches": "batches_2", "parallel": {"data_parallel": 2, **EP2}},
    "expert_4": {"batches": "batches_4", "parallel": {"data_parallel": 2, **EP2}},
    "expert_4_allgather": {"batches": "batches_4", "parallel": {"data_parallel": 2, **EP2}, "moe": {"token_dispatcher": "allgather"}},
    "virtual_pipeline": {"batches": "batches_4", "parallel": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}},
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The metrics of step 1, by case."""
    work = tmp_path_factory.mktemp("accumulation")
    write_glm4_moe(work / "model", max_position_embeddings=64)
    rng = np.random.default_rng(5)
    documents = []
    for i, length in enumerate(LENGTHS):
        mask = np.arange(length) >= 3
        streams = {"token_ids": rng.integers(0, 259, length).astype(np.int32), "loss_mask": mask}
        streams |= {"inference_logprobs": np.where(mask, -5.5 + rng.normal(0, 0.3, length), 0).astype(np.float32)}
        streams |= {"temperatures": np.ones(length), "advantages": np.where(mask, rng.normal(), 0)}
        documents.append(TrainingSample(f"{i}", f"{i}", streams))
    for count, capacity in CAPACITIES.items():
        (work / f"batches_{count}").mkdir()
        micro_batches = pack(documents, 1, 0, capacity=capacity, data_parallel=1)
        assert len(micro_batches) == count
        write_batch(work / f"batches_{count}", StepBatch(1, 0, micro_batches))
    trained = {"train_router": True}
    cases = {name: case | {"steps": 1, "moe": case.get("moe", {}) | trained} for name, case in (ONE | TWO).items()}
    (work / "layouts.json").write_text(json.dumps(cases))
    one = run_ranks("tests/trainer/layout_cases.py:main", 1, [str(work), *ONE])[0]
    two = run_ranks("tests/trainer/layout_cases.py:main", 2, [str(work), *TWO])[0]
    return {name: metrics[0] for name, metrics in (one | two).items()}


@pytest.mark.parametrize("case", [name for name in ONE | TWO if name != "micro_1"])
def test_loss_and_gradient_norm_are_those_of_one_micro_batch(lines, case):
    for key in ("loss/total", "grad_norm", "entropy/mean"):
        assert lines[case][key] == pytest.approx(lines["micro_1"][key], rel=1e-6), key
    assert lines[case]["tokens/trained"] == lines["micro_1"]["tokens/trained"] == sum(LENGTHS) - 3 * len(LENGTHS)
    assert lines["micro_1"]["grad_norm"] > 0.1
