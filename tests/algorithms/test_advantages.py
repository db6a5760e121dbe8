import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.algorithms.advantages import build_advantage

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden_losses.json").read_text())["advantages"]


def test_grpo_is_the_reward_less_the_groups_mean():
    assert build_advantage("grpo")(GOLDEN["R"], [1] * 4) == GOLDEN["dr_grpo"]


def test_with_std_it_is_divided_by_the_unbiased_deviation():
    assert build_advantage("grpo", std=True)(GOLDEN["R"], [1] * 4) == pytest.approx(GOLDEN["grpo_std_ddof1"], abs=2e-6)


@pytest.mark.parametrize("std", [False, True])
def test_advantages_sum_to_zero_and_equal_rewards_have_none(std):
    advantage = build_advantage("grpo", std=std)
    rng = random.Random(0)
    for n in (2, 3, 8):
        assert sum(advantage([rng.random() for _ in range(n)], [5] * n)) == pytest.approx(0, abs=1e-9)
        assert advantage([0.7] * n, [5] * n) == pytest.approx([0.0] * n, abs=1e-9)
    assert advantage([3.0], [5]) == [0.0]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="unknown advantage 'gpro'; known: grpo"):
        build_advantage("gpro")
    with pytest.raises(ValueError, match="advantage 'grpo' has no option 'sdt'; it has: std"):
        build_advantage("grpo", sdt=True)


def test_the_orchestrator_runs_without_torch():
    modules = "megatron_rl.orchestrator.orchestrator, megatron_rl.evals.evaluator, megatron_rl.transports.batches.base"
    code = f"import sys, {modules}; print('torch' in sys.modules, 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]
