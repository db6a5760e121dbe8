"""Megatron's self-attention with a rotary embedding from one table, for where TransformerEngine is not.

Megatron turns each packed sequence by itself, and computes every layer's cosines and sines anew, for queries and for keys.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_rl.kernels.rotary.reference import rotate


def rotary_table(position_ids: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of this rank's tokens, [2, t, rotary_dim / 2] of `dtype`; angles are computed in float32.

    Args:
        position_ids: [1, t] int64, whatever tokens these are (packed sequences, a context rank's share).
        inverse_frequencies: [rotary_dim / 2] float32.
    """
    angles = torch.outer(position_ids.flatten().float(), inverse_frequencies)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


class TorchSelfAttention(SelfAttention):
    """SelfAttention whose `rotary_pos_emb` is a `rotary_table` of the tokens its linears see (all tensor ranks')."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As SelfAttention. The table rides in the argument for key-value states, which self-attention does not have."""
        return super().forward(hidden_states, attention_mask, key_value_states=rotary_pos_emb, **kwargs)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, output_gate: bool = False, split_qkv: bool = True
    ) -> tuple[Tensor, ...]:
        """(query, key, value[, gate]), each [t, 1, heads, d], queries and keys turned by the table.

        `check_supported` makes sure that the tensor ranks divide the key-value heads.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        queries = self.num_attention_heads_per_partition // groups
        sizes = [queries, *([queries] if output_gate else []), 1, 1]
        # Norm and rotation read these slices of the projection as they lie.
        query, *gate, key, value = mixed.view(*mixed.shape[:-1], groups, -1, width).split(sizes, dim=-2)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if key_value_states is not None:
            cos, sin = key_value_states
            query, key = (rotate(heads, cos, sin, self.config.rotary_interleaved) for heads in (query, key))
        return tuple(heads.flatten(2, 3) for heads in (query, key, value, *gate))
