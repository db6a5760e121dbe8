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


def model_inputs(micro_batch: MicroBatch, world: World) -> ModelInputs:
    """Pad for the layout, shift the targets, take this rank's context-parallel share."""
    cu, streams = _pad(micro_batch, world.context_size, world.tensor_size)
    lengths = np.diff(cu)
    shifted = {name: np.concatenate([streams[name][1:], streams[name][:1]]) for name in ("token_ids", *PREDICTED)}
    last = cu[1:] - 1
    pads = {row.name: row.pad for row in STREAMS}
    for name, array in shifted.items():
        array[last] = pads[name]
    arrays = {"tokens": streams["token_ids"], "positions": np.concatenate([np.arange(n) for n in lengths]), **shifted}
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
    )


def _pad(micro_batch: MicroBatch, context: int, tensor: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Documents padded to a multiple of 2 * context (zigzag halves), all together to one of context * tensor (sequence parallel).

    Padding goes to the end of a document, where causal attention keeps it from every real token.
    """
    cu = micro_batch.cu_seqlens.astype(np.int64)
    each = 2 * context if context > 1 else 1
    lengths = -(-np.diff(cu) // each) * each
    whole = math.lcm(each, context * tensor)
    lengths[-1] += -int(lengths.sum()) % whole
    padded = np.concatenate([[0], np.cumsum(lengths)])
    if padded[-1] == cu[-1]:
        return padded, micro_batch.streams
    streams = {}
    for row in STREAMS:
        array = np.full(padded[-1], row.pad, row.dtype)
        for old, new, end in zip(cu[:-1], padded[:-1], cu[1:], strict=True):
            array[new : new + end - old] = micro_batch.streams[row.name][old:end]
        streams[row.name] = array
    return padded, streams
