"""What an environment returned -> a reward that may be trained on. The trust boundary: user code may return anything."""

import math
import numbers
from typing import Any

import numpy as np

from megatron_rl.envs.protocol import Reward


class RewardError(Exception):
    """What the environment returned is not a reward."""


def to_reward(value: Any) -> Reward:
    """A finite number (int, bool, float, numpy scalar) or a Reward of such -> Reward of Python floats.

    0.0 is a reward like any other. RewardError for None, NaN, infinities and what is not a number.
    """
    if isinstance(value, Reward):
        return Reward(_number(value.value, "the reward"), {name: _number(part, f"part {name!r}") for name, part in value.parts.items()})
    return Reward(_number(value, "the reward"))


def _number(value: Any, what: str) -> float:
    if value is None:
        raise RewardError(f"{what} is None; return a number (0.0 is one)")
    if not isinstance(value, numbers.Real | np.number | np.bool_) or isinstance(value, np.complexfloating):
        raise RewardError(f"{what} is {value!r:.80} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:
        raise RewardError(f"{what} is too large for a float") from None
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}, not finite")
    return number
