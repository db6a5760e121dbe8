"""Converted directories load into live models on 1, 2, 3 and 4 ranks, and what live models saved converts back to the source's bits."""

import json
from pathlib import Path

import pytest
import torch
from hf_directories import FAMILIES, assert_same, tensors_of
from ranks import run_ranks
from safetensors.torch import load_file
from test_convert import QUIET, to_hf, to_megatron
from tiny_models import MOE, write_qwen3, write_qwen3_moe

from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.dist_reader import DistReader
from megatron_rl.conversion.megatron_model import TRAINER_LAYOUT
from megatron_rl.conversion.reshard import reshard
from megatron_rl.trainer import checkpoint

pytestmark = pytest.mark.ranks

TP2, PP2, EP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"expert_parallel": 2}
MOE_TP2_EP2 = {**TP2, **EP2, "expert_tensor_parallel": 1}
LOADS = {
    1: [(family, {}) for family in FAMILIES],
    2: [
        ("qwen3", TP2),
        ("qwen3_tied", TP2),
        ("qwen3_tied", PP2),
        ("llama", {**PP2, "virtual_pipeline_parallel": 2}),
        ("qwen3_moe", MOE_TP2_EP2),
        ("glm4_moe", EP2),
        ("deepseek_v3", TP2),
        ("glm_moe_dsa", {**PP2}),
    ],
    3: [("three_layers", {"pipeline_parallel": 3}), ("three_layers", {}), ("three_moe", {"pipeline_parallel": 3})],
    4: [
        ("qwen3_tied", {**TP2, **PP2}),
        ("qwen3_moe", {**PP2, **EP2}),
        ("glm4_moe", {**TP2, **EP2, "expert_tensor_parallel": 2}),
        ("deepseek_v3", {**PP2, **MOE_TP2_EP2}),
    ],
}
SAVES = [
    ("qwen3_tied", {**TP2, **PP2}),
    ("glm4_moe", {**PP2, **MOE_TP2_EP2}),
    ("deepseek_v3", {**TP2, **PP2}),
    ("qwen3_moe", {**PP2, **EP2}),
]
CASES = [(ranks, family, parallel) for ranks, cases in LOADS.items() for family, parallel in cases]


def _name(family: str, parallel: dict) -> str:
    return "-".join([family, *(f"{key[:2]}{key.split('_')[1][:1]}{size}" for key, size in parallel.items())])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """<family>/ and <family>.megatron/, cut for tensor and expert ranks that most launches do not have."""
    path = tmp_path_factory.mktemp("checkpoints")
    writers = FAMILIES | {
        "three_layers": lambda path: write_qwen3(path, tied=True, num_hidden_layers=3),
        "three_moe": lambda path: write_qwen3_moe(path, num_hidden_layers=3),
    }
    for family, write in writers.items():
        write(path / family)
        experts = {"expert_parallel": 4, "expert_tensor_parallel": 2} if family in MOE else {}
        to_megatron(path / family, path / f"{family}.megatron", ParallelConfig(tensor_parallel=2, **experts))
    return path


@pytest.fixture(scope="module")
def launch(folder):
    """Output folder by rank count; each launch made once."""
    made = {}

    def run(ranks: int, more: list[dict]) -> Path:
        if ranks not in made:
            out = folder / f"out{ranks}"
            out.mkdir()
            cases = [
                {"name": _name(family, parallel), "kind": "load", "parallel": parallel, "hf": family, "megatron": f"{family}.megatron"}
                for family, parallel in LOADS[ranks]
            ] + more
            for case in cases:
                case |= {key: str(folder / case[key]) for key in ("hf", "megatron") if key in case}
            (out / "cases.json").write_text(json.dumps(cases))
            made[ranks] = None
            run_ranks(f"{Path(__file__).parent}/checkpoint_cases.py:main", ranks, [str(out / "cases.json"), str(out)], timeout_s=900)
            made[ranks] = out
        assert made[ranks] is not None, f"the launch of {ranks} ranks failed before"
        return made[ranks]

    return run


@pytest.fixture(scope="module")
def four(launch):
    return launch(4, [{"name": f"save-{family}", "kind": "save", "parallel": layout, "hf": family} for family, layout in SAVES])


@pytest.fixture(scope="module")
def launches(folder, launch, four):
    """The training checkpoint that four ranks saved is resharded to pp2 and resumed on two."""
    resharded = folder / "resharded"
    if not resharded.exists():
        source = four / "save-qwen3_tied" / "checkpoints" / "step_1"
        reshard(source, resharded, ParallelConfig(**PP2), folder / "qwen3_tied", resume=False, check=True, console=QUIET)
    resumed = [{"name": "resumed", "kind": "resume", "parallel": PP2, "hf": "qwen3_tied", "megatron": "resharded"}]
    return lambda ranks: launch(ranks, resumed if ranks == 2 else [])


def _merged(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for stage in sorted(path.iterdir()) for name, tensor in load_file(stage).items()}


@pytest.mark.parametrize(("ranks", "family", "parallel"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_a_converted_directory_loads_on_any_layout(ranks, family, parallel, launches, folder):
    assert_same(_merged(launches(ranks) / _name(family, parallel)), tensors_of(folder / family))


@pytest.mark.parametrize(("family", "parallel"), SAVES, ids=[family for family, _ in SAVES])
def test_what_four_ranks_saved_converts_to_the_source(family, parallel, four, folder, tmp_path):
    # On two tensor ranks 259 rows of vocabulary are 260: the padding row stays behind.
    step = four / f"save-{family}" / "checkpoints" / "step_1"
    stored = DistReader(step / "trainer").shape("embedding.word_embeddings.weight")
    assert stored == (259 + ("tensor_parallel" in parallel), 48)
    back = to_hf(step, tmp_path / "back", folder / family, check=True)
    assert_same(tensors_of(back), tensors_of(folder / family))


def test_a_resharded_training_checkpoint_resumes_with_its_optimizer(launches, folder):
    assert_same(_merged(launches(2) / "resumed"), tensors_of(folder / "qwen3_tied"))
    reader = DistReader(folder / "resharded" / "trainer")
    assert [r.sizes for r in reader.regions("optimizer.state.exp_avg.decoder.layers.0.self_attention.linear_proj.weight")] == [(48, 64)]
    assert (folder / "resharded" / "orchestrator" / "state.msgpack").read_bytes() == b"orchestrator"


def test_a_training_checkpoint_finds_its_model_through_its_run(four, folder, tmp_path):
    run = four / "save-qwen3_tied"
    (run / "configs" / "latest").mkdir(parents=True)
    (run / "configs" / "latest" / "resolved.json").write_text(json.dumps({"model": {"path": str(folder / "qwen3_tied")}}))
    back = to_hf(run / "checkpoints" / "step_1" / "trainer", tmp_path / "back")
    assert_same(tensors_of(back), tensors_of(folder / "qwen3_tied"))


def test_both_rooms_mean_the_same_layout_of_training_checkpoints():
    assert TRAINER_LAYOUT == checkpoint.LAYOUT
