"""Every layout computes what transformers computes in float32: log-probs, entropy, gradients; and gives its weights back bit for bit."""

import json
import math
from pathlib import Path

import pytest
import torch
from oracle import LENGTHS, reference, write_micro_batches
from parallel_cases import LEARNING_RATE
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import FAMILIES, VARIANTS, write_qwen3
from transformers import AutoModelForCausalLM

from megatron_rl.models import registry

pytestmark = [pytest.mark.ranks, pytest.mark.parity]

EP2, VPP2 = {"expert_parallel": 2}, {"virtual_pipeline_parallel": 2}
TP2, PP2, CP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}
LAUNCHES = {
    1: [
        {"name": "qwen3", "model": "qwen3", "parallel": {}},
        {"name": "qwen3-tied", "model": "qwen3_tied", "parallel": {}},
        {"name": "llama", "model": "llama", "parallel": {}},
        {"name": "recompute", "model": "qwen3", "parallel": {}, "recompute": "full"},
        {"name": "qwen3-moe", "model": "qwen3_moe", "parallel": {}},
        {"name": "glm4-moe", "model": "glm4_moe", "parallel": {}, "recompute": "full"},
        {"name": "bf16", "model": "qwen3", "parallel": {}, "dtype": "bfloat16", "save_hf": True},
        {"name": "deepseek", "model": "deepseek_v3", "parallel": {}, "recompute": "full"},
        {"name": "dsa", "model": "glm_moe_dsa", "parallel": {}, "recompute": "full"},
        {"name": "deepseek-bf16", "model": "deepseek_v3_yarn", "parallel": {}, "dtype": "bfloat16", "save_hf": True},
    ],
    2: [
        {"name": "tp2", "model": "qwen3", "parallel": TP2},
        {"name": "tp2-tied", "model": "qwen3_tied", "parallel": TP2, "save_hf": True},
        {"name": "tp2-recompute", "model": "qwen3", "parallel": TP2, "recompute": "full"},
        {"name": "tp2-llama", "model": "llama", "parallel": TP2},
        {"name": "pp2", "model": "qwen3", "parallel": PP2, "save_hf": True},
        {"name": "pp2-tied", "model": "qwen3_tied", "parallel": PP2, "save_hf": True},
        {"name": "cp2", "model": "qwen3", "parallel": CP2},
        {"name": "cp2-llama", "model": "llama", "parallel": CP2},
        {"name": "cp2-ring", "model": "qwen3", "parallel": {**CP2, "context_parallel_kind": "ring"}, "recompute": "full"},
        {"name": "cp2-ulysses", "model": "qwen3", "parallel": {**CP2, "context_parallel_kind": "ulysses"}},
        {"name": "pp2-vpp2", "model": "qwen3", "parallel": {**PP2, **VPP2}},
        {"name": "pp2-uneven", "model": "glm4_moe", "parallel": {**PP2, "pipeline_layers": [3, 1]}, "save_hf": True},
        {"name": "pp2-vpp2-uneven", "model": "qwen3_5", "parallel": {**PP2, **VPP2, "pipeline_layers": [1, 2, 1, 1]}, "save_hf": True},
        {"name": "pp2-vpp2-tied", "model": "qwen3_tied", "parallel": {**PP2, **VPP2}, "save_hf": True},
        {"name": "moe-tp2", "model": "qwen3_moe", "parallel": {**TP2, "expert_tensor_parallel": 2}},
        {"name": "moe-tp2-ep2", "model": "qwen3_moe", "parallel": {**TP2, **EP2, "expert_tensor_parallel": 1}, "save_hf": True},
        {"name": "moe-ep2", "model": "qwen3_moe", "parallel": EP2},
        {
            "name": "moe-tp2-ep2-allgather",
            "model": "qwen3_moe",
            "parallel": {**TP2, **EP2, "expert_tensor_parallel": 1},
            "token_dispatcher": "allgather",
        },
        {"name": "moe-pp2", "model": "qwen3_moe", "parallel": PP2},
        {"name": "moe-cp2", "model": "qwen3_moe", "parallel": CP2},
        {"name": "glm-tp2", "model": "glm4_moe", "parallel": TP2},
        {"name": "glm-ep2", "model": "glm4_moe", "parallel": EP2, "save_hf": True},
        {"name": "glm-cp2-ep2", "model": "glm4_moe", "parallel": {**CP2, **EP2}},
        {"name": "glm-pp2-vpp2", "model": "glm4_moe", "parallel": {**PP2, **VPP2}},
        {"name": "deepseek-tp2-ep2", "model": "deepseek_v3", "parallel": {**TP2, **EP2, "expert_tensor_parallel": 1}, "save_hf": True},
        {"name": "deepseek-tp2-yarn", "model": "deepseek_v3_yarn", "parallel": TP2},
        {"name": "deepseek-cp2-ep2", "model": "deepseek_v3", "parallel": {**CP2, **EP2}},
        {"name": "deepseek-ring", "model": "deepseek_v3_yarn", "parallel": {**CP2, "context_parallel_kind": "ring"}},
        {"name": "deepseek-ulysses", "model": "deepseek_v3_yarn", "parallel": {**CP2, "context_parallel_kind": "ulysses"}},
        {"name": "deepseek-pp2-vpp2", "model": "deepseek_v3_yarn", "parallel": {**PP2, **VPP2}},
        {"name": "dsa-tp2", "model": "glm_moe_dsa", "parallel": TP2, "save_hf": True},
        {"name": "dsa-cp2-ep2", "model": "glm_moe_dsa", "parallel": {**CP2, **EP2}},
        {"name": "dsa-pp2", "model": "glm_moe_dsa", "parallel": PP2},
        {"name": "dp2", "model": "qwen3_tied", "parallel": {}},
    ],
    4: [
        {"name": "tp2-pp2-tied", "model": "qwen3_tied", "parallel": {**TP2, **PP2}, "save_hf": True},
        {"name": "tp2-cp2", "model": "qwen3", "parallel": {**TP2, **CP2}},
        {"name": "tp2-cp2-ring", "model": "qwen3", "parallel": {**TP2, **CP2, "context_parallel_kind": "ring"}},
        {"name": "pp2-cp2-llama", "model": "llama", "parallel": {**PP2, **CP2}},
        {"name": "moe-pp2-ep2", "model": "qwen3_moe", "parallel": {**PP2, **EP2}, "save_hf": True},
        {"name": "glm-ep2-etp2", "model": "glm4_moe", "parallel": {**TP2, **EP2, "expert_tensor_parallel": 2}, "save_hf": True},
        {"name": "glm-pp2-vpp2-ep2", "model": "glm4_moe", "parallel": {**PP2, **VPP2, **EP2}, "save_hf": True},
        {"name": "deepseek-pp2-ep2", "model": "deepseek_v3", "parallel": {**PP2, **EP2}, "save_hf": True},
        {"name": "dsa-tp2-cp2", "model": "glm_moe_dsa", "parallel": {**TP2, **CP2}},
        {"name": "tp2-dp2", "model": "qwen3", "parallel": TP2},
    ],
}
CASES = [(ranks, case) for ranks, cases in LAUNCHES.items() for case in cases]
each_case = pytest.mark.parametrize(("ranks", "case"), CASES, ids=[case["name"] for _, case in CASES])


def test_every_family_is_compared():
    assert {family.name for family in registry.FAMILIES} == FAMILIES.keys() <= {case["model"] for _, case in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("parity")
    for name, write in (FAMILIES | VARIANTS).items():
        write(path / name)
    write_qwen3(path / "qwen3_5", tied=False, num_hidden_layers=5)
    return path


@pytest.fixture(scope="module")
def data(folder):
    return write_micro_batches(folder / "data.safetensors", vocab_size=259)


@pytest.fixture(scope="module")
def oracles(folder, data):
    return {path.name: reference(path, data, LEARNING_RATE) for path in folder.iterdir() if (path / "config.json").exists()}


@pytest.fixture(scope="module")
def launches(folder, data):
    """Results by rank count, each launch made once, when the first of its cases asks (a failed one is not tried again)."""
    made = {}

    def launch(ranks: int) -> tuple[list, Path]:
        if ranks not in made:
            out = folder / f"out{ranks}"
            out.mkdir()
            cases = [case | {"model": str(folder / case["model"])} for case in LAUNCHES[ranks]]
            (out / "cases.json").write_text(json.dumps(cases))
            target = f"{Path(__file__).parent}/parallel_cases.py:main"
            made[ranks] = None
            made[ranks] = run_ranks(target, ranks, [str(out / "cases.json"), str(folder / "data.safetensors"), str(out)]), out
        assert made[ranks] is not None, f"the launch of {ranks} ranks failed before"
        return made[ranks]

    return launch


def _merged(path: Path) -> dict[str, torch.Tensor]:
    merged = {}
    for stage in sorted(path.iterdir()):
        tensors = load_file(stage)
        assert not merged.keys() & tensors.keys(), "a tensor was exported by two stages"
        merged |= tensors
    return merged


def _without_tied_head(tensors: dict[str, torch.Tensor], case: dict) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not (name == "lm_head.weight" and "tied" in case["model"])}


def _zigzag_by_hand(lengths: list[int], rank: int) -> list[int]:
    """Two context ranks: of every document cut in four, rank 0 holds quarters 0 and 3, rank 1 quarters 1 and 2."""
    indices, start = [], 0
    for n in lengths:
        quarters = [range(start + q * n // 4, start + (q + 1) * n // 4) for q in range(4)]
        indices += [*quarters[0], *quarters[3]] if rank == 0 else [*quarters[1], *quarters[2]]
        start += n
    return indices


@each_case
def test_log_probs_and_entropy_equal_transformers(ranks, case, launches, oracles):
    results, _ = launches(ranks)
    position = LAUNCHES[ranks].index(case)
    oracle = oracles[case["model"]]
    tolerance = 0.05 if case.get("dtype") == "bfloat16" else 1e-5
    sizes = [case["parallel"].get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "context")]
    data_size = ranks // math.prod(sizes)
    reported = [result[position] for result in results if result[position]["stage_outputs"]]
    assert len(reported) == ranks // sizes[1]
    for result in reported:
        for stream in ("logprobs", "entropy"):
            expected = []
            for number, lengths in enumerate(LENGTHS):
                if number % data_size == result["world"]["data_rank"]:
                    whole = oracle[stream][number]
                    cut = sizes[2] > 1
                    expected.append(whole[_zigzag_by_hand(lengths, result["world"]["context_rank"])] if cut else whole)
            torch.testing.assert_close(torch.tensor(result[stream]), torch.cat(expected), rtol=0, atol=tolerance)


@each_case
def test_gradients_equal_transformers(ranks, case, launches, oracles):
    _, out = launches(ranks)
    gradients = _merged(out / f"{case['name']}.grads")
    expected = _without_tied_head(oracles[case["model"]]["gradients"], case)
    assert gradients.keys() == expected.keys()
    tolerance = 6e-2 if case.get("dtype") == "bfloat16" else 1e-5
    for name, gradient in expected.items():
        error, size = (gradients[name] - gradient).norm(), gradient.norm()
        assert error <= tolerance * size, f"{name}: error {error:.1e} of {size:.1e}"  # an expert that no token chose has gradient 0


@each_case
def test_two_steps_of_sgd_lead_to_the_same_weights(ranks, case, launches, oracles):
    _, out = launches(ranks)
    stepped = _merged(out / f"{case['name']}.stepped")
    expected = _without_tied_head(oracles[case["model"]]["stepped"], case)
    assert stepped.keys() == expected.keys()
    if case.get("dtype") != "bfloat16":
        for name, weight in expected.items():
            assert (stepped[name] - weight).abs().max() < 1e-5, name
    start = oracles[case["model"]]["weights"]
    assert max((expected[name] - start[name]).abs().max() for name in expected) > 5e-3


@each_case
def test_export_returns_the_loaded_bits(ranks, case, launches, oracles):
    _, out = launches(ranks)
    exported = _merged(out / f"{case['name']}.weights")
    expected = _without_tied_head(oracles[case["model"]]["weights"], case)
    assert exported.keys() == expected.keys()
    for name, weight in expected.items():
        dtype = getattr(torch, case.get("dtype", "float32"))
        assert exported[name].dtype == dtype
        assert torch.equal(exported[name], weight.to(dtype)), name


@pytest.mark.parametrize(
    ("ranks", "case"), [(r, c) for r, c in CASES if c.get("save_hf")], ids=lambda v: v["name"] if isinstance(v, dict) else ""
)
def test_saved_directory_opens_in_transformers_with_the_same_weights(ranks, case, launches, oracles):
    _, out = launches(ranks)
    dtype = getattr(torch, case.get("dtype", "float32"))
    saved = out / f"{case['name']}.hf"
    model = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    assert model.dtype == dtype
    model.save_pretrained(saved / "again")
    weights = load_file(saved / "again" / "model.safetensors")
    expected = oracles[case["model"]]["weights"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight.to(dtype)) for name, weight in expected.items())
    assert not saved.with_name(saved.name + ".tmp").exists()


def test_every_rank_knows_its_place(launches):
    # Megatron's order, fastest first: tensor, context, data, pipeline.
    results, _ = launches(4)
    worlds = {case["name"]: [rank[number]["world"] for rank in results] for number, case in enumerate(LAUNCHES[4])}
    assert [(w["tensor_rank"], w["pipeline_rank"]) for w in worlds["tp2-pp2-tied"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(w["first"], w["last"], w["writes"]) for w in worlds["tp2-pp2-tied"]] == [
        (True, False, True),
        (True, False, False),
        (False, True, True),
        (False, True, False),
    ]
    assert [(w["tensor_rank"], w["context_rank"]) for w in worlds["tp2-cp2"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(w["context_rank"], w["pipeline_rank"]) for w in worlds["pp2-cp2-llama"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(w["tensor_rank"], w["data_rank"]) for w in worlds["tp2-dp2"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [w["writes"] for w in worlds["tp2-dp2"]] == [True, False, False, False]
    sizes = [(w["world_size"], w["data_size"], w["tensor_size"], w["context_size"], w["pipeline_size"]) for w in worlds["tp2-dp2"]]
    assert sizes == [(4, 2, 2, 1, 1)] * 4
