"""On TransformerEngine layers every rank of every layout holds what the family's table says, under the torch layers' checkpoint keys."""

import json
from pathlib import Path

import pytest
from te_models import WRITERS
from tiny_models import MOE

from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.layout import Shards
from megatron_rl.models import family_of, read_hf_config
from megatron_rl.models.family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, tied
from megatron_rl.models.naming import entry_of

pytestmark = pytest.mark.ranks

LAYOUTS = [
    {},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"pipeline_parallel": 4},
    {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
    {"context_parallel": 2},
    {"context_parallel": 4},
    {"context_parallel": 2, "context_parallel_kind": "ring"},
    {"context_parallel": 2, "context_parallel_kind": "ulysses"},
    {"data_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 4},
    {"tensor_parallel": 2, "context_parallel": 2},
    {"tensor_parallel": 2, "data_parallel": 2},
    {"pipeline_parallel": 2, "context_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2, "data_parallel": 2},
]
EXPERT_LAYOUTS = [
    {"expert_parallel": 2},
    {"expert_parallel": 8},
    {"tensor_parallel": 2, "expert_parallel": 2},
    {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1},
    {"expert_parallel": 2, "expert_tensor_parallel": 2},
    {"pipeline_parallel": 2, "expert_parallel": 2},
    {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "expert_parallel": 2},
    {"context_parallel": 2, "expert_parallel": 4},
    {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 1, "pipeline_parallel": 2},
    {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2},
]


def _chunks(layout: dict) -> int:
    return layout.get("pipeline_parallel", 1) * layout.get("virtual_pipeline_parallel", 1)


CASES = [
    (model, layout)
    for model in WRITERS
    for layout in LAYOUTS + (EXPERT_LAYOUTS if model in MOE else [])
    if model != "qwen3_tied" or "pipeline_parallel" in layout or not layout
    if model != "glm_moe_dsa" or not ("context_parallel_kind" in layout or _chunks(layout) == 4)  # refused by check_supported
]


@pytest.fixture(scope="module")
def built(in_te, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "cases.json").write_text(json.dumps(CASES))
    return folder, in_te("te_layout_cases.py:main", [str(folder), str(folder / "cases.json")])


@pytest.mark.parametrize("model", WRITERS)
def test_every_rank_holds_the_tensors_of_the_table(built, model):
    folder, results = built
    for layout in [layout for name, layout in CASES if name == model]:
        for rank, found in enumerate(results[f"{model} {json.dumps(layout)}"]):
            expected = expected_tensors(folder / model, ParallelConfig(**layout), rank)
            assert found["tensors"] == [{name: [list(shape), "meta"] for name, shape in chunk.items()} for chunk in expected], (
                layout,
                rank,
            )


@pytest.mark.parametrize("model", WRITERS)
def test_checkpoint_keys_and_places_are_those_of_the_torch_layers(built, model):
    for layout in [layout for name, layout in CASES if name == model]:
        ranks = built[1][f"{model} {json.dumps(layout)}"]
        for found in (ranks[0], ranks[-1]):
            assert found["keys"] == found["torch keys"] and all(found["keys"]), layout


@pytest.mark.parametrize("model", WRITERS)
def test_the_layers_are_transformer_engines(built, model):
    (found,) = built[1][f"{model} {{}}"]
    wanted = {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "RMSNorm"}
    wanted |= {"SharedIndexAttention"} if model == "glm_moe_dsa" else {"TEDotProductAttention"}
    wanted |= {"TEGroupedMLP"} if model in MOE else set()
    assert wanted <= set(found["kinds"])
    assert not {"TorchAttention", "TorchRMSNorm", "RowParallelLinear", "SequentialMLP"} & set(found["kinds"])


def expected_tensors(directory: Path, parallel: ParallelConfig, rank: int) -> list[dict[str, tuple[int, ...]]]:
    """By chunk: canonical name -> shape on `rank`. Megatron counts ranks tensor first, then context or experts, then data, then stages."""
    hf = read_hf_config(directory)
    family = family_of(hf)
    stages, virtual = parallel.pipeline_parallel, parallel.virtual_pipeline_parallel
    stage, within = divmod(rank, parallel.world_size // stages)
    expert_tensor = parallel.expert_tensor_parallel or parallel.tensor_parallel
    expert_rank = within // expert_tensor % parallel.expert_parallel
    dimensions = family.dimensions(hf)
    experts = dimensions.get("experts", 0) // parallel.expert_parallel
    entries = 2 * hf["num_hidden_layers"] // (stages * virtual)
    chunks: list[dict[str, tuple[int, ...]]] = [{} for _ in range(stages * virtual)]
    for rule in family.tensors(hf):
        entry = entry_of(rule.megatron)
        chunk = 0 if rule.megatron == EMBEDDING_WEIGHT else -1 if entry is None else entry // entries
        if rule.expert is None or rule.expert // experts == expert_rank:
            size = parallel.tensor_parallel if rule.expert is None else expert_tensor
            chunks[chunk][rule.megatron] = Shards(rule, hf, dimensions, size).shard_shape()
            if rule.megatron == EMBEDDING_WEIGHT and tied(hf) and len(chunks) > 1:
                chunks[-1][OUTPUT_WEIGHT] = chunks[0][EMBEDDING_WEIGHT]
    return chunks[stage::stages]
