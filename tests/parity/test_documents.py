"""What both sides read: the same everywhere, and divisible over the layout."""

import itertools

import numpy as np
import pytest

from megatron_rl.config.parity import ParityConfig
from megatron_rl.models.layers.context_parallel import zigzag_indices
from megatron_rl.parity.documents import micro_batches, predictions

LAYOUTS = [
    dict(zip(("tensor_parallel", "context_parallel", "data_parallel"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 3), repeat=3)
]


def config(**words):
    return ParityConfig(model="any", **words)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_documents_divide_over_context_ranks_and_micro_batches_over_tensor_ranks(layout, packed):
    tensor, context, data = layout.values()
    for tokens in (8, 50, 64):
        batches = micro_batches(config(**layout, packed=packed, tokens=tokens), 127)
        assert len(batches) == 2 * data
        assert predictions(batches) > 0  # the loss is a mean over them
        for documents in batches:
            assert all(len(document) % (2 * context if context > 1 else 1) == 0 and len(document) for document in documents)
            assert sum(map(len, documents)) % (context * tensor) == 0
        # Every replica's i-th micro-batch has one length: the all-gather dispatcher needs it.
        sizes = [sum(map(len, documents)) for documents in batches]
        assert all(len(set(sizes[i : i + data])) == 1 for i in range(0, len(sizes), data))


def test_packed_documents_are_ragged_and_end_inside_every_context_shard():
    for documents in micro_batches(config(packed=True, context_parallel=2, seed=3), 127):
        lengths = [len(document) for document in documents]
        assert len(lengths) == 4 and len(set(lengths)) > 1
        document_of = np.repeat(range(4), lengths)
        for rank in (0, 1):
            share = zigzag_indices(np.cumsum([0, *lengths]), rank, 2).numpy()
            assert np.unique(document_of[share]).tolist() == [0, 1, 2, 3]


def test_a_pipeline_gets_a_micro_batch_per_stage_and_one_document_unless_packed():
    batches = micro_batches(config(pipeline_parallel=3), 127)
    assert [len(documents) for documents in batches] == [1, 1, 1]
    # 64 tokens, then an eighth less each time
    assert [len(documents[0]) for documents in batches] == [64, 56, 48]
    assert predictions(batches) == 63 + 55 + 47


def test_the_seed_alone_decides_the_tokens():
    first, again, other = (micro_batches(config(packed=True, seed=seed), 127) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(itertools.chain(*first), itertools.chain(*again), strict=True))
    assert not np.array_equal(first[0][0][:4], other[0][0][:4])
    tokens = np.concatenate(list(itertools.chain(*first)))
    assert tokens.min() >= 0 and tokens.max() < 127
