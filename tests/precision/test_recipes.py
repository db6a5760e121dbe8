"""Recipes of [precision]: which are refused where, and what Megatron is told."""

import pytest
from pydantic import ValidationError

from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.precision import check, is_ignored, megatron_fields, token_alignment

RECIPES = ("delayed", "current", "blockwise", "mxfp8", "nvfp4")
RUNS_ON = {
    "A100": ((8, 0), ()),
    "L40S": ((8, 9), ("delayed", "current")),
    "H100": ((9, 0), ("delayed", "current", "blockwise")),
    "B200": ((10, 0), RECIPES),
    "RTX 5090": ((12, 0), ("delayed", "current", "blockwise", "nvfp4")),
}


@pytest.mark.parametrize("gpu", RUNS_ON)
def test_a_gpu_runs_the_recipes_its_generation_brought(gpu):
    capability, runs = RUNS_ON[gpu]
    assert tuple(recipe for recipe in RECIPES if not check(PrecisionConfig(recipe=recipe), gpu, capability)) == runs


def test_a_refusal_names_the_key_the_gpu_and_what_would_run():
    assert check(PrecisionConfig(recipe="mxfp8"), "NVIDIA H100", (9, 0)) == [
        "precision.recipe = 'mxfp8': does not run on NVIDIA H100 (compute capability 9.0); use delayed, current, blockwise or none"
    ]
    assert check(PrecisionConfig(recipe="current"), "NVIDIA A100", (8, 0)) == [
        "precision.recipe = 'current': does not run on NVIDIA A100 (compute capability 8.0); set precision.recipe = \"none\""
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_a_gpu_every_recipe_but_none_is_refused(recipe):
    (problem,) = check(PrecisionConfig(recipe=recipe), "this machine", None)
    assert problem == f'precision.recipe = {recipe!r}: needs a GPU, and this machine has none; set precision.recipe = "none"'
    assert check(PrecisionConfig(), "this machine", None) == []


def test_megatron_is_told_the_recipe_and_nothing_without_one():
    assert megatron_fields(PrecisionConfig()) == {}
    assert megatron_fields(PrecisionConfig(recipe="current")) == {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    assert megatron_fields(PrecisionConfig(recipe="blockwise")) == {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    assert megatron_fields(PrecisionConfig(recipe="mxfp8", format="hybrid")) == {"fp8": "hybrid", "fp8_recipe": "mxfp8"}
    assert megatron_fields(PrecisionConfig(recipe="nvfp4")) == {"fp4": "e2m1", "fp4_recipe": "nvfp4"}


def test_blocks_kept_in_bfloat16_count_two_entries_of_megatrons_stack_each():
    fields = megatron_fields(PrecisionConfig(recipe="blockwise", first_layers_bf16=1, last_layers_bf16=3))
    assert (fields["num_layers_at_start_in_bf16"], fields["num_layers_at_end_in_bf16"]) == (2, 6)
    assert fields["first_last_layers_bf16"] is True


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"format": "e4m3"}, "quantises nothing"),
        ({"last_layers_bf16": 1}, "quantises nothing"),
        ({"recipe": "delayed", "first_layers_bf16": 1}, "use recipe = 'current'"),
        ({"recipe": "nvfp4", "format": "hybrid"}, "leave it out"),
        ({"recipe": "fp8"}, "'none', 'delayed'"),
    ],
)
def test_settings_that_contradict_the_recipe_are_refused(table, problem):
    with pytest.raises(ValidationError, match=problem):
        PrecisionConfig(**table)


def test_the_ignore_list_keeps_what_decides_and_what_is_small():
    kept = ["lm_head", "model.embed_tokens", "model.norm", "model.layers.3.mlp.gate", "model.layers.3.self_attn.q_norm"]
    kept += ["model.layers.3.input_layernorm", "model.layers.0.self_attn.indexer.wq_b", "model.layers.0.linear_attn.in_proj_ba"]
    quantised = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.experts.7.up_proj"]
    assert all(is_ignored(f"{name}.weight") for name in kept)
    assert not any(is_ignored(f"model.layers.3.{name}.weight") for name in quantised)


def test_rows_are_aligned_for_the_recipe():
    assert [token_alignment(PrecisionConfig(recipe=recipe)) for recipe in ("none", *RECIPES)] == [1, 16, 16, 16, 32, 128]
