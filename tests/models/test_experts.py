"""Our experts are Megatron's to a checkpoint and to the optimizer; the oracle is Megatron's SequentialMLP on the same ranks."""

from pathlib import Path

import pytest
from experts_cases import LAYOUTS
from ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(f"{Path(__file__).parent}/experts_cases.py:main", 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_hold_the_same_pieces(ranks, layout):
    for rank in ranks:
        case = rank[list(LAYOUTS).index(layout)]
        assert any(piece[0] == "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" for piece in case["ours"]["pieces"])
        assert case["ours"]["pieces"] == case["megatron"]["pieces"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_reduced_over_the_same_ranks(ranks, layout):
    for rank in ranks:
        case = rank[list(LAYOUTS).index(layout)]
        assert case["ours"]["parameters"] == case["megatron"]["parameters"]
