"""Our table of recipes and GPUs, and our list of what is not quantised, are those of TransformerEngine and Megatron."""

import pytest
from te_models import WRITERS

from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.models import family_of, read_hf_config
from megatron_rl.precision import check, is_ignored, token_alignment

pytestmark = pytest.mark.ranks
CAPABILITY = {"A100": (8, 0), "L40S": (8, 9), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
RECIPES = ("delayed", "current", "blockwise", "mxfp8", "nvfp4")


@pytest.fixture(scope="module")
def asked(in_te, tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision")
    return folder, in_te("te_precision_cases.py:main", [str(folder)])


def test_recipes_run_where_transformer_engine_says_so(asked):
    ours = {gpu: {recipe: not check(PrecisionConfig(recipe=recipe), gpu, at) for recipe in RECIPES} for gpu, at in CAPABILITY.items()}
    assert ours == asked[1]["transformer_engine"]


def test_megatron_refuses_in_the_forward_pass_what_we_refuse_before_anything_starts(asked):
    assert asked[1]["megatron"] == asked[1]["transformer_engine"]


def test_rows_are_aligned_as_megatron_aligns_them(asked):
    assert {recipe: token_alignment(PrecisionConfig(recipe=recipe)) for recipe in RECIPES} == asked[1]["alignment"]


def test_whole_blocks_stay_in_bfloat16(asked):
    assert asked[1]["bf16 entries"] == [0, 1, 4, 5, 6, 7]  # of four blocks the first and the last two


@pytest.mark.parametrize("model", WRITERS)
def test_the_trainer_quantises_every_matrix_but_those_on_the_ignore_list(asked, model):
    folder, result = asked
    hf = read_hf_config(folder / model)
    rules = list(family_of(hf).tensors(hf))
    quantised = {tensor.name for rule in rules if rule.megatron in result["quantised"][model] for tensor in rule.hf}
    matrices = {tensor.name for rule in rules for tensor in rule.hf if len(tensor.dims) == 2}
    assert quantised == {name for name in matrices if not is_ignored(name)}
