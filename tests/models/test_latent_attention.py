"""Latent and sparse attention beside the parity of layouts: what is refused, who shares whose keys, what is frozen, what is passed over."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from oracle import LENGTHS, write_micro_batches
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_models import write_deepseek_v3, write_glm_moe_dsa
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.models import check_supported, family_of, read_hf_config

PREDICTION = "model.layers.4.eh_proj.weight"


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "deepseek"
    write_deepseek_v3(path)
    return read_hf_config(path)


@pytest.fixture(scope="module")
def glm_directory(tmp_path_factory):
    """With the tensor of a block that predicts further tokens."""
    path = tmp_path_factory.mktemp("models") / "glm"
    write_glm_moe_dsa(path, num_nextn_predict_layers=1)
    save_file({**load_file(path / "model.safetensors"), PREDICTION: torch.ones(48, 96)}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def glm(glm_directory):
    return read_hf_config(glm_directory)


def _yarn(**changes):
    fields = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8, "original_max_position_embeddings": 16, "mscale": 1, "mscale_all_dim": 1}
    return {"rope_parameters": fields | changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (_yarn(mscale_all_dim=0.5), "only with mscale = mscale_all_dim"),
        (_yarn(attention_factor=1.2), "no attention_factor"),
        (_yarn(factor=None), "needs 'factor'"),
        (_yarn(rope_type="llama3"), "rope type 'llama3' is not supported, only 'default', 'yarn'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported, only 4"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_group": 2}, "twice topk_group"),
    ],
)
def test_what_deepseek_v3_would_compute_differently_is_refused(deepseek, changes, expected):
    (problem,) = check_supported(deepseek | changes, ParallelConfig())
    assert expected in problem


@pytest.mark.parametrize(
    ("changes", "sizes", "expected"),
    [
        ({"q_lora_rank": None}, {}, "'q_lora_rank' is missing"),
        ({"indexer_rope_interleave": False}, {}, "indexer_rope_interleave = False"),
        ({"indexer_types": ["full"] * 3}, {}, "indexer_types must name one of ['full', 'shared'] for each of the 4 layers"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, {}, "no layer before it has one"),
        (_yarn(), {}, "rope type 'yarn' is not supported, only 'default'"),
        ({}, {"context_parallel": 2, "context_parallel_kind": "ring"}, "choose 'all_gather'"),
        ({}, {"context_parallel": 2, "context_parallel_kind": "ulysses"}, "choose 'all_gather'"),
        # Chunks of one layer; layers 1 and 3 take the keys of the layer before.
        ({}, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, "4 pipeline chunks cut before layers [1, 3]"),
    ],
)
def test_what_sparse_attention_cannot_do_is_refused(glm, changes, sizes, expected):
    (problem,) = check_supported(glm | changes, ParallelConfig(**sizes))
    assert expected in problem


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3},
        {"index_topk_pattern": "FSSFSFFSSS"},
    ],
)
def test_every_spelling_of_index_sharing_means_what_it_does_in_transformers(fields):
    types = GlmMoeDsaConfig(num_hidden_layers=10, **fields).indexer_types
    expected = [max(i for i in range(layer + 1) if types[i] == "full") for layer in range(10)]
    hf = {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 10, **fields}
    assert list(family_of(hf).index_sources(hf)) == expected


def test_the_fixture_s_chosen_keys_do_not_depend_on_rounding(tmp_path):
    """Every document's choice stays the same when all weights change by a few 1e-5 of themselves."""
    model = write_glm_moe_dsa(tmp_path / "glm")
    data = write_micro_batches(tmp_path / "data.safetensors", vocab_size=259)
    before = _chosen_keys(model, data)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-5 * torch.randn(parameter.shape, generator=generator))
    assert _chosen_keys(model, data) == before
    assert len({keys for keys in before if len(keys) == 6}) > 20  # documents are longer than the 6 keys, and choices differ


def _chosen_keys(model, data):
    """Of every query of every full block, the keys it may see and chose."""
    chosen = []

    def record(_module, _inputs, indices):
        chosen.extend(frozenset(key for key in row.tolist() if key <= query) for query, row in enumerate(indices[0]))

    hooks = [module.register_forward_hook(record) for module in model.modules() if isinstance(module, GlmMoeDsaIndexer)]
    for number, lengths in enumerate(LENGTHS):
        for ids in data[f"{number}.ids"].split(lengths):
            model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return chosen


@pytest.fixture(scope="module")
def report(glm_directory, glm):
    unannounced = glm_directory.with_name("unannounced")
    shutil.copytree(glm_directory, unannounced)
    (unannounced / "config.json").write_text(json.dumps(glm | {"num_nextn_predict_layers": 0}))
    return run_ranks(f"{Path(__file__).parent}/latent_cases.py:main", 1, [str(glm_directory), str(unannounced)])[0]


@pytest.mark.ranks
def test_blocks_for_multi_token_prediction_are_passed_over_where_the_config_announces_them(report):
    assert f"unexpected tensor {PREDICTION}" in report["error"]


@pytest.mark.ranks
def test_the_indexer_is_frozen(report):
    kinds = ("k_norm.bias", "k_norm.weight", "linear_weights_proj.weight", "linear_wk.weight", "linear_wq_b.weight")
    # Blocks 0 and 2, which are stack entries 0 and 4; and the routers of blocks 1 to 3.
    indexers = [f"decoder.layers.{entry}.self_attention.core_attention.indexer.{kind}" for entry in (0, 4) for kind in kinds]
    assert report["frozen"] == sorted([*indexers, *(f"decoder.layers.{entry}.mlp.router.weight" for entry in (3, 5, 7))])


@pytest.mark.ranks
def test_a_saved_config_tells_the_engine_how_the_indexer_turns(report, glm_directory):
    saved = read_hf_config(str(glm_directory) + ".saved")
    assert "indexer_rope_interleave" not in read_hf_config(glm_directory)
    assert saved["indexer_rope_interleave"] is True
