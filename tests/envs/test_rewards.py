import fractions

import numpy as np
import pytest

from megatron_rl.envs.protocol import Reward
from megatron_rl.envs.rewards import RewardError, to_reward


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 0.0),
        (0, 0.0),
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        (-2.5, -2.5),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (fractions.Fraction(1, 4), 0.25),
        (Reward(0.0), 0.0),
        (Reward(np.int8(1)), 1.0),
    ],
)
def test_finite_numbers_become_floats(value, expected):
    reward = to_reward(value)
    assert reward == Reward(expected)
    assert type(reward.value) is float


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (None, "is None"),
        (float("nan"), "nan, not finite"),
        (float("inf"), "inf, not finite"),
        (np.float32("-inf"), "-inf, not finite"),
        ("1.0", "'1.0' (str), not a number"),
        ([1.0], "(list), not a number"),
        (1j, "(complex), not a number"),
        (np.complex64(1), "(complex64), not a number"),
        (10**400, "too large"),
        (Reward(None), "is None"),
        (Reward(1.0, {"style": float("nan")}), "part 'style' is nan"),
        (Reward(1.0, {"style": None}), "part 'style' is None"),
    ],
)
def test_anything_else_is_refused_with_its_cause(value, cause):
    with pytest.raises(RewardError) as error:
        to_reward(value)
    assert cause in str(error.value)


def test_parts_become_floats():
    assert to_reward(Reward(1, {"length": np.int32(7), "ok": True})).parts == {"length": 7.0, "ok": 1.0}
