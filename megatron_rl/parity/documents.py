"""The documents both sides read: random token ids, the same wherever they are made. No torch import."""

import math

import numpy as np

from megatron_rl.config.parity import ParityConfig

MicroBatch = list[np.ndarray]
"""The token ids of its documents, each int64 [length]."""
PACKED = 4
"""Documents of a packed micro-batch."""


def micro_batches(config: ParityConfig, vocab_size: int) -> list[MicroBatch]:
    """All micro-batches of a step; number i belongs to data-parallel rank i % replicas.

    Documents divide over the context ranks' zigzag chunks, micro-batches also over the tensor ranks (sequence parallel). Replicas hold
    micro-batches of the same lengths, one after the other, as the all-gather dispatcher needs.
    """
    generator = np.random.default_rng(config.seed)
    document_unit = 2 * config.context_parallel if config.context_parallel > 1 else 1
    unit = math.lcm(document_unit, config.context_parallel * config.tensor_parallel)
    batches = []
    for slot in range(max(2, config.pipeline_parallel)):
        tokens = math.ceil(config.tokens * (1 - slot % 4 / 8) / unit) * unit
        for _ in range(config.replicas):
            cuts = _cuts(generator, tokens // document_unit) if config.packed else []
            bounds = [0, *(cut * document_unit for cut in cuts), tokens]
            batches.append([generator.integers(0, vocab_size, n) for n in np.diff(bounds)])
    return batches


def predictions(batches: list[MicroBatch]) -> int:
    """Predicted tokens of a step: the loss is the mean over them."""
    return sum(len(document) - 1 for documents in batches for document in documents)


def _cuts(generator: np.random.Generator, units: int) -> list[int]:
    """Where to cut `units` into PACKED documents of random lengths (fewer, where there are fewer units)."""
    return sorted(generator.choice(np.arange(1, units), min(units, PACKED) - 1, replace=False).tolist())
