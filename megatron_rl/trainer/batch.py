"""A packed micro-batch -> the tensors one rank's model sees.

Streams are token-aligned; the model predicts token t + 1 at position t. Here, and only here, labels and targets are
shifted: entry i of every target belongs to the prediction made at position i. A document's last position predicts
nothing and is off every mask.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl import platform
from megatron_rl.models.layers.context_parallel import zigzag_indices
from megatron_rl.platform import World
from megatron_rl.transports.batches.records import STREAMS, MicroBatch

PREDICTED = ("temperatures", "loss_mask", "inference_logprobs", "advantages", "rl_weights", "ce_weights")
"""Streams read at the position that predicts the token."""


@dataclass
class ModelInputs:
    """One micro-batch on this rank; t is its share of the padded tokens under context parallel."""

    token_ids: torch.Tensor  # int64 [1, t]
    position_ids: torch.Tensor  # int64 [1, t], restarting at 0 in every document
    labels: torch.Tensor  # int64 [1, t]
    packed: PackedSeqParams  # boundaries of the documents before context parallel splits them
    targets: dict[str, torch.Tensor]  # [t], by the names in PREDICTED
    denominators: dict[str, float]
    documents: torch.Tensor  # int64 [2, t]: number of each token's document, -1 for padding; how many documents there are


def padded_tokens(micro_batch: MicroBatch, world: World, alignment: int) -> int:
    """Tokens of the micro-batch once padded for the layout and to a multiple of `alignment` on every context rank, over all of them."""
    return int(_padded_offsets(micro_batch, world, alignment)[-1])


def model_inputs(micro_batch: MicroBatch, world: World, tokens: int | None = None) -> ModelInputs:
    """Pad for the layout (and up to `tokens`, a length that `padded_tokens` gave), shift the targets, take this rank's context-parallel
    share."""
    cu, streams = _pad(micro_batch, world, tokens)
    lengths = np.diff(cu)
    shifted = {name: np.concatenate([streams[name][1:], streams[name][:1]]) for name in ("token_ids", *PREDICTED)}
    last = cu[1:] - 1
    pads = {row.name: row.pad for row in STREAMS}
    for name, array in shifted.items():
        array[last] = pads[name]
    real = np.diff(micro_batch.cu_seqlens) if micro_batch.sample_ids else np.zeros(len(lengths), np.int64)
    documents = np.concatenate([np.where(np.arange(n) < end, i, -1) for i, (n, end) in enumerate(zip(lengths, real, strict=True))])
    positions = np.concatenate([np.arange(n) for n in lengths])
    arrays = {"documents": documents, "tokens": streams["token_ids"], "positions": positions, **shifted}
    device = platform.device()
    tensors = {name: torch.from_numpy(np.array(array)).to(device) for name, array in arrays.items()}
    if world.context_size > 1:
        share = zigzag_indices(cu, world.context_rank, world.context_size).to(device)
        tensors = {name: tensor[share] for name, tensor in tensors.items()}
    boundaries, longest = torch.from_numpy(cu.astype(np.int32)).to(device), int(lengths.max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return ModelInputs(
        token_ids=tensors["tokens"].long()[None],
        position_ids=tensors["positions"].long()[None],
        labels=tensors["token_ids"].long()[None],
        packed=packed,
        targets={name: tensors[name] for name in PREDICTED},
        denominators=micro_batch.denominators,
        documents=torch.stack([tensors["documents"], torch.full_like(tensors["documents"], len(lengths))]),
    )


def _padded_offsets(micro_batch: MicroBatch, world: World, alignment: int = 1) -> np.ndarray:
    """Documents padded to a multiple of 2 * context (zigzag halves), all together to one of context * tensor (sequence parallel)."""
    each = 2 * world.context_size if world.context_size > 1 else 1
    lengths = -(-np.diff(micro_batch.cu_seqlens.astype(np.int64)) // each) * each
    lengths[-1] += -int(lengths.sum()) % math.lcm(each, world.context_size * world.tensor_size, world.context_size * alignment)
    return np.concatenate([[0], np.cumsum(lengths)])


def _pad(micro_batch: MicroBatch, world: World, tokens: int | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Offsets and streams with the padding at the end of documents, where causal attention keeps it from every real token."""
    cu, padded = micro_batch.cu_seqlens.astype(np.int64), _padded_offsets(micro_batch, world)
    padded[-1] = tokens or padded[-1]
    if padded[-1] == cu[-1]:
        return padded, micro_batch.streams
    streams = {}
    for row in STREAMS:
        array = np.full(padded[-1], row.pad, row.dtype)
        for old, new, end in zip(cu[:-1], padded[:-1], cu[1:], strict=True):
            array[new : new + end - old] = micro_batch.streams[row.name][old:end]
        streams[row.name] = array
    return padded, streams
