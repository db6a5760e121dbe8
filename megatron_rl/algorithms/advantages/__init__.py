"""Advantages by name: rewards and lengths of one group -> one advantage per rollout."""

from collections.abc import Callable, Sequence

from megatron_rl.algorithms import factories
from megatron_rl.algorithms.advantages import grpo

Advantage = Callable[[Sequence[float], Sequence[int]], list[float]]
ADVANTAGES: dict[str, Callable[..., Advantage]] = {"grpo": grpo.build}


def build_advantage(name: str, **options: object) -> Advantage:
    """The advantage `name` with its options. ValueError names an unknown one and the known ones."""
    return factories.build("advantage", ADVANTAGES, name, options)
