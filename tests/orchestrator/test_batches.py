import random

import pytest
from test_groups import GRPO, complete

from megatron_rl.config.base import ConfigError
from megatron_rl.config.orchestrator import OrchestratorConfig
from megatron_rl.orchestrator.batches import BatchBuilder
from megatron_rl.orchestrator.groups import judge
from megatron_rl.orchestrator.metrics import batch_metrics
from megatron_rl.orchestrator.staleness import newest_batch, staleness, too_stale


def builder(batch_size=8, lag=1, last_step=10, in_order=False, **limits):
    return BatchBuilder(OrchestratorConfig(batch_size=batch_size, lag=lag, **limits), lag, last_step, in_order)


def trained(rewards, number=0, version=0, reasons=None):
    return judge(complete(rewards, reasons, number, version), GRPO, True)


def test_version_arithmetic():
    # lag 0: batch n needs version n - 1. lag 1: with version 0, batches 1 and 2 may be generated.
    assert [newest_batch(v, 0) for v in (0, 1, 2)] == [1, 2, 3]
    assert [newest_batch(v, 1) for v in (0, 1, 2)] == [2, 3, 4]
    # batch 5 updates version 4
    assert [staleness(5, v) for v in (4, 3, 0)] == [0, 1, 4]
    assert [too_stale(5, v, 1) for v in (4, 3, 2)] == [False, False, True]


@pytest.mark.parametrize(
    ("step", "version", "open_rollouts", "ready", "wanted"),
    [
        (1, 0, 0, 0, 16),  # batches 1 and 2
        (1, 0, 8, 4, 4),
        (2, 0, 0, 0, 8),  # batch 2 only
        (3, 0, 0, 0, 0),  # batch 3 waits for version 1
        (3, 1, 0, 4, 4),
        (10, 9, 0, 0, 8),  # nothing beyond the last step
        (2, 1, 20, 0, -4),  # a group may reach over
    ],
)
def test_the_gate_counts_what_is_open_and_ready(step, version, open_rollouts, ready, wanted):
    b = builder()
    if ready:
        b.add(trained([0.0, 1.0, 1.0, 0.0]), step)
    assert b.wanted(step, version, open_rollouts) == wanted


def test_lag_beyond_the_staleness_bound_would_only_make_groups_to_drop():
    assert builder(lag=3, max_off_policy_steps=1).wanted(1, 0, 0) == builder(lag=1).wanted(1, 0, 0) == 16


def test_a_batch_is_exactly_batch_size_first_ready_first_shipped():
    b = builder(batch_size=6)
    for number in (4, 2, 7):
        b.add(trained([0.0, 1.0, 0.0, 1.0], number), 1)
    selection = b.take(1)
    assert [r.rollout_id for r, _ in selection.rollouts] == ["s-4-0", "s-4-1", "s-4-2", "s-4-3", "s-2-0", "s-2-1"]
    assert [r.rollout_id for r in selection.surplus] == ["s-2-2", "s-2-3"]
    assert b.take(2) is None  # 4 of 6
    assert [j.group.draw.number for j in b.ready] == [7]


def test_in_order_ships_by_group_number():
    b = builder(batch_size=4, in_order=True)
    for number in (5, 3):
        b.add(trained([0.0, 1.0], number), 1)
    assert [j.group.draw.number for j in b.take(1).groups] == [3, 5]


def test_a_shrunk_group_leaves_room_for_another():
    b = builder(batch_size=8)
    b.add(trained([0.0, 1.0, 1.0, 0.0], 0, reasons=["stop", "error", "stop", "stop"]), 1)
    b.add(trained([0.0, 1.0, 1.0, 0.0], 1), 1)
    assert b.take(1) is None
    assert b.wanted(1, 0, 0) == 9
    b.add(trained([0.0, 1.0, 1.0, 0.0], 2), 1)
    selection = b.take(1)
    assert len(selection.rollouts) == 8 and len(selection.surplus) == 3


def test_stale_ready_groups_are_dropped_whole():
    b = builder(batch_size=4, max_off_policy_steps=2)
    for version in (0, 1, 2):
        b.add(trained([0.0, 1.0], version, version), 4)
    assert [j.group.draw.number for j in b.expire(4)] == [0]  # staleness 3
    selection = b.take(4)
    assert [j.group.draw.number for j in selection.groups] == [1, 2]
    assert [(j.group.draw.number, j.fate) for j in selection.dropped] == [(0, "stale")]


def test_too_many_filtered_groups_for_one_batch_end_the_run():
    b = builder(batch_size=2, max_filtered_groups=3)
    b.add(trained([1.0, 1.0]), 1)
    b.add(trained([0.0, 1.0], reasons=["stop", "timeout"]), 1)
    b.add(trained([0.0, 1.0]), 1)
    assert b.take(1) is not None
    b.add(trained([1.0, 1.0]), 2)  # counted for batch 2 alone
    b.add(trained([1.0, 1.0]), 2)
    with pytest.raises(ConfigError, match=r"batch 2: 3 groups were filtered \(zero_advantage 3, unusable 0; mean reward 1; .* stop 6\)"):
        b.add(trained([1.0, 1.0]), 2)


def test_metrics_count_all_finished_rollouts_of_the_groups_considered():
    b = builder(batch_size=4, max_off_policy_steps=5)
    b.add(trained([1.0, 1.0, 1.0, 1.0], 0), 3)  # filtered
    b.add(trained([1.0, 0.0, 0.0, 0.0], 1, reasons=["stop", "error", "timeout", "overlong"]), 3)  # unusable
    b.add(trained([1.0, 0.0], 2, version=1), 3)
    b.add(trained([0.0, 1.0], 3, version=2, reasons=["length", "stop"]), 3)
    b.expire(3)
    m = batch_metrics(b.take(3))
    # finished: 1 1 1 1 | 1 | 1 0 | 0 1 -> 7 of 9
    assert m["reward/mean"] == pytest.approx(7 / 9)
    assert m["reward/std"] == pytest.approx((7 / 9 * 2 / 9) ** 0.5)
    assert m["reward/s/mean"] == m["reward/mean"]
    assert (m["staleness/mean"], m["staleness/max"]) == (0.5, 1)  # versions 1 and 2 at step 3
    assert (m["groups/trained"], m["groups/filtered"], m["groups/unusable"], m["groups/stale"]) == (2, 1, 1, 0)
    assert [m[f"rollouts/{x}"] for x in ("trained", "surplus", "length", "error", "timeout", "overlong")] == [4, 0, 1, 1, 1, 1]
    assert m["tokens/sampled"] == 8
    assert m["time/rollout"] == 0.5


@pytest.mark.parametrize("seed", range(10))
def test_no_random_schedule_takes_a_stale_group_or_another_size(seed):
    rng = random.Random(seed)
    limit = rng.randint(0, 3)
    b = builder(batch_size=6, max_off_policy_steps=limit, last_step=1000)
    step = 1
    for number in range(300):
        version = rng.randint(max(0, step - 1 - 5), step - 1)
        b.add(trained([0.0, *(rng.choice([0.0, 1.0]) for _ in range(rng.randint(1, 4))), 1.0], number, version), step)
        b.expire(step)
        selection = b.take(step)
        if selection:
            assert len(selection.rollouts) == 6
            assert max(staleness(step, r.min_version) for r, _ in selection.rollouts) <= limit
            step += 1
    assert step > 5
