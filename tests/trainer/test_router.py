"""Routers stay as loaded unless they are to be trained, and a run does not change its mind on resume."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import write_qwen3_moe

from megatron_rl.transports.batches.filesystem import write_batch
from megatron_rl.transports.batches.packing import pack
from megatron_rl.transports.batches.records import StepBatch, TrainingSample

pytestmark = pytest.mark.ranks

CASES = {
    "frozen": {"steps": 2},
    "trained": {"steps": 2, "moe": {"train_router": True}},
    "thawed": {"steps": 2, "moe": {"train_router": True}, "resume_from": "frozen/checkpoints/step_1"},
    "stiffened": {"steps": 2, "resume_from": "trained/checkpoints/step_1"},
    "resumed": {"steps": 2, "moe": {"train_router": True}, "resume_from": "trained/checkpoints/step_1"},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    path = tmp_path_factory.mktemp("router")
    write_qwen3_moe(path / "model", max_position_embeddings=64)
    (path / "batches").mkdir()
    rng = np.random.default_rng(2)
    for step in (1, 2):
        documents = []
        for i, length in enumerate((9, 14, 11)):
            streams = {"token_ids": rng.integers(0, 259, length), "ce_weights": np.arange(length) > 0}
            documents.append(TrainingSample(f"{step}/{i}", f"{step}/{i}", streams))
        write_batch(path / "batches", StepBatch(step, step - 1, pack(documents, step, step - 1, capacity=40, data_parallel=1)))
    (path / "layouts.json").write_text(json.dumps(CASES))
    return path


@pytest.fixture(scope="module")
def results(work):
    return run_ranks("tests/trainer/layout_cases.py:main", 1, [str(work), *CASES])[0]


def weights(path: Path) -> dict[str, torch.Tensor]:
    (file,) = path.glob("model*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("case", ["frozen", "trained", "resumed"])
def test_routers_move_when_trained_and_only_then(work, results, case):
    before, after = weights(work / "model"), weights(work / "runs" / case / "hf" / "step_2")
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3  # block 1 is dense
    for name in routers:
        assert torch.equal(before[name], after[name]) == (case == "frozen"), name
    assert all(not torch.equal(before[name], after[name]) for name in before if "experts" in name)


def test_a_resume_that_thaws_or_freezes_the_routers_is_refused_in_one_line(work, results):
    assert {case: results[case] for case in ("thawed", "stiffened")} == {
        "thawed": f"trainer.moe.train_router = true: the routers of {work}/runs/frozen/checkpoints/step_1 were frozen; "
        "resume with train_router = false, or start a new run from its HF export",
        "stiffened": f"trainer.moe.train_router = false: the routers of {work}/runs/trained/checkpoints/step_1 were trained; "
        "resume with train_router = true, or start a new run from its HF export",
    }
