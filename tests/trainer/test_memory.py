"""What saves memory changes no number: recomputed modules, activations and optimizer in host memory, on tensor and pipeline ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import write_glm4_moe, write_qwen3

from megatron_rl.transports.batches.filesystem import write_batch
from megatron_rl.transports.batches.packing import pack
from megatron_rl.transports.batches.records import StepBatch, TrainingSample

pytestmark = pytest.mark.ranks

LAYOUTS = {"tp2": {"tensor_parallel": 2}, "pp2": {"pipeline_parallel": 2}}
MODULES = {"dense": ["core_attn", "mlp"], "moe": ["core_attn", "mlp", "moe"]}
MEMORY = {
    "plain": lambda model: {},
    "recomputed": lambda model: {"recompute": "selective", "recompute_modules": MODULES[model]},
    "offloaded": lambda model: {"offload_activations": True},
    "offloaded_recomputed": lambda model: {"offload_activations": True, "recompute": "full"},
    "offloaded_optimizer": lambda model: {"offload_optimizer": True},
}
CASES = {
    f"{model}-{layout}-{option}": {"model": model, "parallel": LAYOUTS[layout], "memory": memory(model), "moe": {"train_router": True}}
    for model in MODULES
    for layout in LAYOUTS
    for option, memory in MEMORY.items()
}
SHARED = {"recompute": "selective", "recompute_modules": ["shared_experts"]}
EXTRA = {"shared": {"model": "moe", "parallel": LAYOUTS["tp2"], "memory": SHARED, "moe": {"train_router": True}}}
REFUSED = {"absent": {"model": "dense", "parallel": LAYOUTS["tp2"], "memory": {"recompute": "selective", "recompute_modules": ["moe"]}}}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    write_qwen3(path / "dense", tied=True, max_position_embeddings=64)
    write_glm4_moe(path / "moe", max_position_embeddings=64)
    (path / "batches").mkdir()
    rng = np.random.default_rng(4)
    for step in (1, 2):
        documents = []
        for i, length in enumerate((19, 14, 31, 8)):
            streams = {"token_ids": rng.integers(0, 259, length), "ce_weights": np.arange(length) > 0}
            documents.append(TrainingSample(f"{step}/{i}", f"{step}/{i}", streams))
        write_batch(path / "batches", StepBatch(step, step - 1, pack(documents, step, step - 1, capacity=50, data_parallel=1)))
    (path / "layouts.json").write_text(json.dumps(CASES | EXTRA | REFUSED))
    return path


@pytest.fixture(scope="module")
def results(work):
    return run_ranks("tests/trainer/layout_cases.py:main", 2, [str(work), *CASES, *EXTRA, *REFUSED], timeout_s=900)[0]


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = [load_file(file) for file in (run / "hf" / "step_2").glob("*.safetensors")]  # one per pipeline stage
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.mark.parametrize("case", [name for name in [*CASES, *EXTRA] if not name.endswith("plain")])
def test_loss_gradients_and_weights_are_bit_identical(work, results, case):
    plain = "moe-tp2-plain" if case in EXTRA else case.rpartition("-")[0] + "-plain"
    for line, expected in zip(results[case], results[plain], strict=True):
        assert (line["loss/total"], line["grad_norm"]) == (expected["loss/total"], expected["grad_norm"])
    ours, reference = weights(work / "runs" / case), weights(work / "runs" / plain)
    assert ours.keys() == reference.keys() and all(torch.equal(ours[name], reference[name]) for name in reference)


def test_a_module_the_model_has_not_is_refused(results):
    assert results["absent"] == "trainer.recompute_modules: the model has no 'moe'; leave it out"
