"""GRPO: reward minus the group's mean; optionally over the group's standard deviation.

Without the division this is Dr. GRPO's advantage (Liu et al., 2025), the default; with it, GRPO's (Shao et al., 2024),
with the unbiased estimator (ddof 1) and 1e-6 added.
"""

import statistics
from collections.abc import Callable, Sequence


def build(std: bool = False) -> Callable[[Sequence[float], Sequence[int]], list[float]]:
    def advantage(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
        mean = statistics.fmean(rewards)
        scale = statistics.stdev(rewards) + 1e-6 if std and len(rewards) > 1 else 1.0
        return [(reward - mean) / scale for reward in rewards]

    return advantage
