"""Training samples -> micro-batches of at most `capacity` tokens, as many for each data-parallel rank, of like cost.

First-fit decreasing. Denominators are float64 sums over the whole step, so they don't depend on the packing.
"""

import math
from collections.abc import Sequence

import numpy as np

from megatron_rl.transports.batches.records import COMPONENTS, STREAMS, MicroBatch, TrainingSample

ATTENTION_COST = 1 / 12288
"""Cost of a document of n tokens: n + ATTENTION_COST n^2. Causal attention takes n / (12 h) of the FLOPs of a layer's linear
maps (2 n h against 24 h^2 per token), here at hidden size h = 1024."""


def pack(
    samples: Sequence[TrainingSample], step: int, policy_version: int, *, capacity: int, data_parallel: int, keep_order: bool = False
) -> list[MicroBatch]:
    """Micro-batches; rank r of d = data_parallel trains result[r::d], every rank as many.

    Every sample is in exactly one micro-batch, whole. keep_order: fill micro-batches in the order given (deterministic
    runs), without balancing. ValueError for no samples, or one longer than `capacity`.
    """
    if not samples:
        raise ValueError(f"step {step}: no samples to pack")
    for sample in samples:
        if len(sample) > capacity:
            raise ValueError(f"sample {sample.sample_id} has {len(sample)} tokens, a micro-batch holds {capacity}; samples are never cut")
    totals = denominators(samples)
    bins = fill_in_order(samples, capacity) if keep_order else balance(first_fit_decreasing(samples, capacity), data_parallel)
    micro_batches = [join(group, step, policy_version, totals) for group in bins]
    missing = -len(micro_batches) % data_parallel
    return micro_batches + [MicroBatch.empty(step, policy_version, totals) for _ in range(missing)]


def denominators(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Of each loss component with any weight: the float64 sum of its weights over all tokens of the step.

    Samples' sums are added with exact rounding, so their order does not matter.
    """
    sums = {name: math.fsum(float(s.streams[f"{name}_weights"].sum(dtype=np.float64)) for s in samples) for name in COMPONENTS}
    return {name: total for name, total in sums.items() if total}


def first_fit_decreasing(samples: Sequence[TrainingSample], capacity: int) -> list[list[TrainingSample]]:
    """Longest first, each into the first bin with room."""
    bins: list[list[TrainingSample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=len, reverse=True):
        index = next((i for i, left in enumerate(room) if left >= len(sample)), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(capacity)
        bins[index].append(sample)
        room[index] -= len(sample)
    return bins


def fill_in_order(samples: Sequence[TrainingSample], capacity: int) -> list[list[TrainingSample]]:
    """In the order given; a new bin when the next sample does not fit."""
    bins: list[list[TrainingSample]] = [[]]
    for sample in samples:
        if sum(map(len, bins[-1])) + len(sample) > capacity:
            bins.append([])
        bins[-1].append(sample)
    return bins


def balance(bins: list[list[TrainingSample]], ranks: int) -> list[list[TrainingSample]]:
    """Split the costliest bins until `ranks` divides their number (or none can be split), then deal them out.

    Dealing: costliest first, a row of one bin per rank at a time; within a row the costliest goes to the rank that has
    least so far. Rank r's share of the result is result[r::ranks].
    """
    bins = list(bins)
    while len(bins) % ranks and (splittable := [b for b in bins if len(b) > 1]):
        heaviest = max(splittable, key=cost)
        bins.remove(heaviest)
        bins += first_fit_halves(heaviest)
    bins.sort(key=cost, reverse=True)
    load = [0.0] * ranks
    dealt: list[list[TrainingSample]] = []
    for start in range(0, len(bins), ranks):
        row = bins[start : start + ranks]
        order = sorted(range(ranks), key=lambda r: load[r])
        if len(row) < ranks:  # an incomplete row is the last: ranks count from 0 in it, the others get an empty micro-batch
            order = list(range(len(row)))
        placed = dict(zip(order, row, strict=False))
        for rank, group in sorted(placed.items()):
            load[rank] += cost(group)
            dealt.append(group)
    return dealt


def first_fit_halves(samples: list[TrainingSample]) -> list[list[TrainingSample]]:
    """Two bins of like cost: costliest first, each to the lighter one."""
    halves: list[list[TrainingSample]] = [[], []]
    for sample in sorted(samples, key=len, reverse=True):
        min(halves, key=cost).append(sample)
    return halves


def cost(samples: Sequence[TrainingSample]) -> float:
    """Relative time of one micro-batch: linear in tokens, quadratic in each document."""
    return sum(len(s) + ATTENTION_COST * len(s) ** 2 for s in samples)


def join(samples: Sequence[TrainingSample], step: int, policy_version: int, totals: dict[str, float]) -> MicroBatch:
    """One micro-batch of `samples`, one after another."""
    return MicroBatch(
        step=step,
        policy_version=policy_version,
        cu_seqlens=np.cumsum([0, *map(len, samples)], dtype=np.int32),
        streams={row.name: np.concatenate([s.streams[row.name] for s in samples]) for row in STREAMS},
        denominators=totals,
        sample_ids=[s.sample_id for s in samples],
    )


def padding_fraction(micro_batches: Sequence[MicroBatch]) -> float:
    """Share of all tokens that belong to no sample (the empty micro-batches)."""
    return sum(len(m) for m in micro_batches if not m.sample_ids) / sum(map(len, micro_batches))
