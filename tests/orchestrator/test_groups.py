import random
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.algorithms.advantages import build_advantage
from megatron_rl.envs.protocol import Task
from megatron_rl.orchestrator.groups import Group, judge
from megatron_rl.orchestrator.tasks import Draw
from megatron_rl.traces.records import Rollout

GRPO = build_advantage("grpo")


def rollout(index, reward=0.0, finish_reason="stop", version=0, tokens=2, group="s-0"):
    """One prompt token and `tokens` sampled ones."""
    n = 1 + tokens
    return Rollout(
        rollout_id=f"{group}-{index}",
        source="s",
        task_id="t",
        group_id=group,
        token_ids=np.arange(n, dtype=np.int32),
        sampled=np.arange(n) >= 1,
        logprobs=np.full(n, -1.0, np.float32),
        versions=[(version, 1, n)] if tokens else [],
        temperature=1.0,
        reward=reward,
        finish_reason=finish_reason,
        timings={"total": 0.5, "engine": 0.25},
    )


def group(size=4, number=0, version=0):
    return Group(Draw(number, "s", 0), SimpleNamespace(id="s", group_size=size), Task("t", []), version)


def complete(rewards, reasons=None, number=0, version=0):
    g = group(len(rewards), number, version)
    for i, reward in enumerate(rewards):
        g.add(i, rollout(i, reward, reasons[i] if reasons else "stop", version, group=g.id))
    return g


def test_a_group_is_complete_with_its_last_rollout_in_any_order():
    order = list(range(6))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        g = group(6)
        assert [g.add(i, rollout(i)) for i in order] == [False] * 5 + [True]


@pytest.mark.parametrize("index", [1, 4, -1])
def test_a_rollout_twice_or_of_another_group_is_refused(index):
    g = group(4)
    g.add(1, rollout(1))
    with pytest.raises(ValueError, match="group s-0: rollout"):
        g.add(index, rollout(index))


def test_advantages_are_over_the_usable_rollouts_by_index():
    judged = judge(complete([1.0, 9.0, 0.0, 9.0, 0.5], ["stop", "error", "length", "timeout", "stop"]), GRPO, True)
    assert judged.fate == "train"
    assert [(r.rollout_id, a) for r, a in judged.usable] == [("s-0-0", 0.5), ("s-0-2", -0.5), ("s-0-4", 0.0)]


@pytest.mark.parametrize(
    ("rewards", "reasons", "fate"),
    [
        ([1.0, 1.0, 1.0], None, "zero_advantage"),
        ([0.0, 0.0, 0.0], None, "zero_advantage"),
        ([1.0, 0.0, 0.0], ["error", "stop", "stop"], "zero_advantage"),  # equal among those that count
        ([1.0, 0.0, 0.0], ["stop", "overlong", "timeout"], "unusable"),
        ([0.0, 0.0, 0.0], ["error", "error", "error"], "unusable"),
        ([1.0, 0.0, 0.0], ["stop", "stop", "error"], "train"),
        ([0.1 + 0.2, 0.3, 0.3], None, "train"),  # raw equality, no tolerance
    ],
)
def test_fates(rewards, reasons, fate):
    assert judge(complete(rewards, reasons), GRPO, True).fate == fate


def test_without_the_filter_flat_groups_train_with_advantage_zero():
    judged = judge(complete([1.0, 1.0]), GRPO, False)
    assert judged.fate == "train" and [a for _, a in judged.usable] == [0.0, 0.0]
    assert judge(complete([1.0, 1.0], ["stop", "error"]), GRPO, False).fate == "unusable"


def test_a_rollout_without_sampled_tokens_is_not_usable():
    g = group(2)
    g.add(0, rollout(0, 1.0, tokens=0))
    g.add(1, rollout(1, 0.0))
    assert judge(g, GRPO, True).fate == "unusable"


def test_the_oldest_token_dates_the_group():
    g = group(3)
    for i, version in enumerate((4, 2, 3)):
        g.add(i, rollout(i, float(i), version=version))
    assert judge(g, GRPO, True).min_version == 2


def test_lengths_are_counted_in_sampled_tokens():
    seen = []
    g = group(2)
    g.add(0, rollout(0, 1.0, tokens=3))
    g.add(1, rollout(1, 0.0, tokens=5))
    judge(g, lambda rewards, lengths: seen.append((rewards, lengths)) or [0.0, 0.0], True)
    assert seen == [([1.0, 0.0], [3, 5])]
