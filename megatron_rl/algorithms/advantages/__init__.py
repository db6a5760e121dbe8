"""Advantages by name: rewards and lengths of one group -> one advantage per rollout."""

import inspect
from collections.abc import Callable, Sequence

from megatron_rl.algorithms.advantages import grpo

Advantage = Callable[[Sequence[float], Sequence[int]], list[float]]
ADVANTAGES: dict[str, Callable[..., Advantage]] = {"grpo": grpo.build}


def build_advantage(name: str, **options: object) -> Advantage:
    """The advantage `name` with its options. ValueError names an unknown one and the known ones."""
    if name not in ADVANTAGES:
        raise ValueError(f"unknown advantage {name!r}; known: {', '.join(sorted(ADVANTAGES))}")
    known = inspect.signature(ADVANTAGES[name]).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"advantage {name!r} has no option {option!r}; it has: {', '.join(known)}")
    return ADVANTAGES[name](**options)
