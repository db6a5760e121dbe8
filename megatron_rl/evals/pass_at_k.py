"""pass@k without bias from n samples of a task (Chen et al., 2021)."""

import math


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from `samples` of which `correct` are right, is right.

    1 - C(samples - correct, k) / C(samples, k). ValueError unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {correct} correct in {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`."""
    return [1 << i for i in range(limit.bit_length())]
