"""Low precision multiplies blocks of rows, so packs are padded to a multiple of them on every context rank."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.trainer.batch import model_inputs, padded_tokens
from megatron_rl.transports.batches.packing import pack
from megatron_rl.transports.batches.records import TrainingSample


@pytest.mark.parametrize(
    ("context", "tensor", "alignment", "tokens"),
    [
        (1, 1, 1, 17),  # 5 + 12 tokens as they are
        (1, 1, 16, 32),
        (1, 2, 16, 32),
        (1, 4, 1, 20),
        (2, 1, 16, 32),  # documents to 8 + 12 (multiples of 4), then two ranks of 16
        (2, 2, 32, 64),
    ],
)
def test_packs_are_padded_to_the_alignment_on_every_context_rank(context, tensor, alignment, tokens):
    samples = [TrainingSample(str(n), str(n), {"token_ids": np.arange(n), "loss_mask": np.arange(n) > 0}) for n in (5, 12)]
    (micro_batch,) = pack(samples, 1, 0, capacity=17, data_parallel=1)
    world = SimpleNamespace(context_size=context, context_rank=0, tensor_size=tensor)
    assert padded_tokens(micro_batch, world, alignment) == tokens
    inputs = model_inputs(micro_batch, world, tokens)
    assert inputs.token_ids.shape == (1, tokens // context)
    assert int(inputs.packed.cu_seqlens_q[-1]) == tokens
