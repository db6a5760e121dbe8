"""One launch of two ranks: values gathered as JSON, and optimizer checkpoints of embeddings tied over pipeline stages."""

from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_models import write_qwen3

from megatron_rl.platform import gather_json

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    # 259 x 48 embedding elements are no multiple of 128, the unit to which Megatron pads a bucket.
    tied = tmp_path_factory.mktemp("model") / "tied"
    write_qwen3(tied, tied=True)
    return run_ranks(f"{Path(__file__).parent}/platform_cases.py:two_ranks", 2, [str(tied)])


def test_values_of_any_length_reach_every_rank_in_rank_order(reports):
    # one null, four characters; then a value of another length on each rank, not ASCII
    expected = [[None, None], [[0, ""], [1, "\u00e9" * 5000]]]
    assert [report["gathered"] for report in reports] == [expected, expected]


def test_one_rank_gathers_what_the_wire_would_have_made_of_it():
    assert gather_json((1, "a"), 1) == [[1, "a"]]


def test_saved_masters_are_the_weights_they_are_named_after(reports):
    for report in reports:
        assert len(report["fixed"]) > 10 and all(report["fixed"].values())
        assert report["restored"]
    # What the fix is for: without it the last stage's tensors after the embedding are shifted. If this fails, Megatron is repaired.
    assert not all(reports[1]["stock"].values())
