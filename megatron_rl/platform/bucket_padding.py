"""Megatron-Core 0.19.2: optimizer checkpoints of buffers with several gradient buckets.

DistributedOptimizer.sharded_param_state_fully_reshardable gathers a buffer without the padding between its buckets, but cuts the
parameters out of it at offsets that count that padding. From the second bucket on, every master weight and moment is then saved shifted
("can lead to data corruption", says its own log). Several buckets exist whenever embeddings are tied over pipeline stages (they get a
bucket of their own) or gradients are reduced in buckets.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@contextmanager
def unpadded_offsets(optimizer: MegatronOptimizer) -> Iterator[None]:
    """While open, the buffers' parameter offsets leave bucket padding out. Hold it open around `optimizer.sharded_state_dict`."""
    members = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    buffers = [buffer for member in members if isinstance(member, DistributedOptimizer) for buffer in member.buffers]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        offsets, start = {}, 0
        for bucket in buffer.buckets:
            offsets |= {p: (start + first, start + last, bucket.bucket_id) for p, (first, last) in bucket.param_to_index.items()}
            start += bucket.numel_unpadded
        # The same order: the n-th entry is the n-th tensor of the checkpoint.
        buffer.param_index_map = {parameter: offsets[parameter] for parameter in buffer.param_index_map}
    try:
        yield
    finally:
        for buffer, offsets in zip(buffers, padded, strict=True):
            buffer.param_index_map = offsets
