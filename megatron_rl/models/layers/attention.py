"""Causal attention on torch's scaled_dot_product_attention, for where TransformerEngine is not.

Megatron's own DotProductAttention knows neither packed sequences nor context parallel; this one knows both.
"""

import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.models.layers.context_parallel import GatherSequence, share, zigzag
from megatron_rl.models.layers.ring_attention import ring_attention
from megatron_rl.models.layers.ulysses import ulysses_attention


class TorchAttention(MegatronModule):
    """Core attention with grouped queries: [s, b, heads, d] or packed [t, heads, d] in, heads merged out. Values may be of another width.

    Packed sequences do not see one another: the cost is the sum of squared lengths and no mask is built. Neighbours of one length are
    attended in one call (packing sorts by length, so there are many). Under context parallel, by Megatron's `cp_comm_type`:
      all_gather (default)  queries stay, keys and values of all ranks are gathered (one all-gather forward, one reduce-scatter backward)
      p2p                   queries stay, keys and values travel around the ranks (models.layers.ring_attention)
      a2a                   heads are exchanged for tokens and back (models.layers.ulysses)
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.group = pg_collection.cp
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        kinds = {"all_gather": self._gather, "p2p": self._ring, "a2a": self._exchange}
        if cp_comm_type not in (None, *kinds):
            raise ValueError(f"cp_comm_type = {cp_comm_type!r} is not supported without TransformerEngine, only {', '.join(kinds)}")
        if cp_comm_type == "p2p" and self.dropout:
            raise ValueError("cp_comm_type = 'p2p' without TransformerEngine has no attention dropout; set attention_dropout = 0")
        self.attend_over_ranks = kinds[cp_comm_type or "all_gather"]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[s, b, heads * d], or [t, heads * d] when packed. The mask is always causal within a sequence."""
        size = self.group.size()
        if packed_seq_params is None:
            lengths = [query.shape[0] * size]
        else:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            lengths = sequence_offsets(packed_seq_params).diff().tolist()
        output = self._attend_sequences(query, key, value, lengths) if size == 1 else self.attend_over_ranks(query, key, value, lengths)
        return output.flatten(2) if packed_seq_params is None else output.flatten(1)

    def _attend_sequences(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        runs = runs_of(lengths)
        tokens = [length * count for length, count in runs]
        parts = []
        for (length, count), *qkv in zip(runs, query.split(tokens), key.split(tokens), value.split(tokens), strict=True):
            if count == 1:
                parts.append(self._attend(*qkv, None))
            else:  # [count * length, b, heads, d] -> [length, count * b, heads, d] and back
                rows = (tensor.unflatten(0, (count, length)).transpose(0, 1).flatten(1, 2) for tensor in qkv)
                parts.append(self._attend(*rows, None).unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        rank, size, device = self.group.rank(), self.group.size(), query.device
        gathered = GatherSequence.apply(torch.cat([key, value], dim=-1), self.group)
        parts, start = [], 0
        for length in lengths:
            end = start + share(length, size)
            keys, values = gathered[:, start:end].flatten(0, 1).split([key.shape[-1], value.shape[-1]], dim=-1)
            key_positions = torch.cat([zigzag(length, other, size) for other in range(size)]).to(device)
            mask = zigzag(length, rank, size).to(device)[:, None] >= key_positions
            parts.append(self._attend(query[start:end], keys, values, mask))
            start = end
        return torch.cat(parts)

    def _ring(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        runs = runs_of([share(length, self.group.size()) for length in lengths])
        return ring_attention(query, key, value, runs, self.scale or query.shape[-1] ** -0.5, self.group)

    def _exchange(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        return ulysses_attention(query, key, value, lengths, partial(self._attend_sequences, lengths=lengths), self.group)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.permute(2, 0, 1, 3)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """No weights."""
        return {}


def sequence_offsets(packed: PackedSeqParams) -> Tensor:
    """Offsets of the packed sequences including their padding, [sequences + 1] int32, before context parallel splits them."""
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded


def runs_of(lengths: list[int]) -> list[tuple[int, int]]:
    """(length, count) of neighbours of one length: [4, 4, 8] -> [(4, 2), (8, 1)]."""
    return [(length, len(list(equal))) for length, equal in itertools.groupby(lengths)]
