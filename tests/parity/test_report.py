"""The comparison finds what differs, says where, and passes nothing that it has not compared."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import write_glm4_moe

from megatron_rl.models import family_of
from megatron_rl.parity import report
from megatron_rl.parity.exchange import Tensors

GROUPS = {"q": "attention", "k": "attention", "n": "norms", "bias": "router", "w": "router"}
GRADIENTS = {
    "q": np.array([[1.0, -4.0], [0.5, 2.0]], np.float32),
    "k": np.array([3.0, 1.0], np.float32),
    "n": np.array([0.25, 0.5], np.float32),
    "w": np.array([0.0, 0.0], np.float32),
}


@pytest.fixture
def compare(tmp_path):
    """Rows by group of GRADIENTS and of GRADIENTS with changes; a change to None leaves the tensor out."""

    def rows(bound=1e-4, by_relative=True, **changes):
        ours = {name: tensor for name, tensor in {**GRADIENTS, **changes}.items() if tensor is not None}
        save_file(GRADIENTS, tmp_path / "oracle.gradients.0.safetensors")
        # Two stages, each with tensors of its own.
        save_file({name: ours[name] for name in list(ours)[:2]}, tmp_path / "ours.gradients.0.0.safetensors")
        save_file({name: ours[name] for name in list(ours)[2:]}, tmp_path / "ours.gradients.1.0.safetensors")
        both = (Tensors(tmp_path, f"{side}.gradients") for side in ("oracle", "ours"))
        return {row.group: row for row in report.compare_tensors("gradient", *both, GROUPS, bound, by_relative)}

    return rows


def test_equal_tensors_pass_and_what_neither_side_trains_is_frozen(compare):
    rows = compare()
    assert {group: (row.tensors, row.frozen) for group, row in rows.items()} == {"attention": (2, 0), "norms": (1, 0), "router": (1, 1)}
    assert all(row.passed and row.absolute == row.relative == 0 for row in rows.values())


def test_one_wrong_element_fails_its_group_alone_and_names_the_tensor(compare):
    # |-4.002 + 4| = 0.002, of a largest element 4: 5e-4
    rows = compare(q=np.array([[1.0, -4.002], [0.5, 2.0]], np.float32))
    assert [group for group, row in rows.items() if not row.passed] == ["attention"]
    row = rows["attention"]
    assert (row.worst, row.absolute, row.relative) == ("q", pytest.approx(2e-3, rel=1e-3), pytest.approx(5e-4, rel=1e-3))
    assert compare(q=np.array([[1.0, -4.0002], [0.5, 2.0]], np.float32))["attention"].passed  # 5e-5


def test_parameters_are_judged_by_the_absolute_difference(compare):
    changed = {"q": GRADIENTS["q"] + np.float32(2e-3), "n": GRADIENTS["n"] + np.float32(5e-4)}
    rows = compare(bound=1e-3, by_relative=False, **changed)
    assert [group for group, row in rows.items() if not row.passed] == ["attention"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_never_passes(compare, bad):
    row = compare(k=np.array([3.0, bad], np.float32), q=GRADIENTS["q"] + 1)["attention"]
    assert (row.passed, row.worst, math.isnan(row.absolute)) == (False, "k", True)
    assert json.loads(json.dumps(report.as_json([row]), allow_nan=False))[0]["absolute"] is None


def test_any_gradient_where_transformers_has_none_fails(compare):
    rows = compare(w=np.array([0.0, 1e-12], np.float32))
    assert (rows["router"].passed, rows["router"].relative) == (False, math.inf)


def test_a_tensor_that_one_side_lacks_fails(compare):
    row = compare(n=None)["norms"]
    assert (row.passed, row.worst) == (False, "n (only transformers trains it)")
    row = compare(bias=np.zeros(1, np.float32))["router"]
    assert (row.passed, row.worst) == (False, "bias (only our side trains it)")
    assert not compare(more=np.zeros(1, np.float32))["unknown"].passed


def test_a_tensor_of_another_shape_or_written_twice_is_our_mistake(compare, tmp_path):
    with pytest.raises(RuntimeError, match=r"k: transformers has shape \[2\], we have \[3\]"):
        compare(k=np.zeros(3, np.float32))
    save_file({"q": GRADIENTS["q"]}, tmp_path / "ours.gradients.2.0.safetensors")
    with pytest.raises(RuntimeError, match="two ranks wrote q"):
        compare()


@pytest.fixture
def outputs(tmp_path):
    """Of two micro-batches of 3 + 2 and 4 tokens, held by two ranks in an order of their own."""
    batches = [[np.zeros(3), np.zeros(2)], [np.zeros(4)]]
    reference = {name: np.arange(9, dtype=np.float32) * sign for name, sign in (("log_probs", -1), ("entropy", 1))}
    save_file(reference, tmp_path / "oracle.outputs.0.safetensors")
    positions = np.array([8, 0, 3, 4, 7, 1, 2, 6, 5])
    ours = {"positions": positions, **{name: values[positions] for name, values in reference.items()}}
    return Tensors(tmp_path, "oracle.outputs"), ours, batches


def test_outputs_are_compared_token_by_token(outputs):
    theirs, ours, batches = outputs
    assert all(row.passed for row in report.compare_outputs(theirs, ours, batches, 1e-4))
    ours["entropy"][4] += 0.5  # token 7 of all: the third of micro-batch 1
    log_probs, entropy = report.compare_outputs(theirs, ours, batches, 1e-4)
    assert log_probs.passed and not entropy.passed
    assert (entropy.absolute, entropy.worst) == (0.5, "micro-batch 1, token 2")
    ours["log_probs"][2] = math.nan
    assert (row := report.compare_outputs(theirs, ours, batches, 1e-4)[0]).worst == "micro-batch 0, token 3" and not row.passed


def test_a_token_that_no_rank_computed_or_two_did_is_our_mistake(outputs):
    theirs, ours, batches = outputs
    ours["positions"][0] = 5
    with pytest.raises(RuntimeError, match="the ranks computed 9 tokens, of 9 that there are"):
        report.compare_outputs(theirs, ours, batches, 1e-4)


def test_losses_of_every_step_count():
    assert report.compare_losses(np.array([2.0, 1.5]), np.array([2.0, 1.5]), 1e-4).passed
    row = report.compare_losses(np.array([2.0, 1.5]), np.array([2.0, 1.625]), 1e-4)
    assert (row.passed, row.absolute, row.worst) == (False, 0.125, "step 1: 1.625000")


def test_every_tensor_of_a_model_has_its_group(tmp_path):
    write_glm4_moe(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    groups = report.groups_of(family_of(hf), hf)
    assert list(dict.fromkeys(groups.values())) == [
        "embedding",
        "attention",
        "mlp",
        "router",
        "experts",
        "shared experts",
        "norms",
        "head",
    ]
    of = {
        "self_attn.q_proj.bias": "attention",
        "self_attn.k_norm.weight": "norms",
        "post_attention_layernorm.weight": "norms",
        "mlp.gate.weight": "router",
        "mlp.gate.e_score_correction_bias": "router",
        "mlp.experts.7.down_proj.weight": "experts",
        "mlp.shared_experts.up_proj.weight": "shared experts",
    }
    assert {name: groups[f"model.layers.2.{name}"] for name in of} == of
    assert (groups["model.layers.0.mlp.up_proj.weight"], groups["model.norm.weight"], groups["lm_head.weight"]) == ("mlp", "norms", "head")
