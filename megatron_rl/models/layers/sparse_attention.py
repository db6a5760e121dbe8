"""DeepSeek sparse attention on latent attention: an indexer chooses which keys a query attends to (DeepSeek-V3.2; GLM-5).

Keys and values are never expanded: a query is taken into the space of the keys' latents, and what it attends to there is taken out of it.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from torch import Tensor

from megatron_rl.models.layers.latent_attention import LatentAttention


class SparseLatentAttention(LatentAttention):
    """LatentAttention whose core attends to latents: one key [latent | rotary] for all heads, its first part being the value."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: None = None,
    ) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        """query [t, heads, latent + rotary], key [t, 1, latent + rotary] (not packed: [s, b, ...]), no value; the query's latent and the
        keys' [t / tensor ranks, 1, rank]."""
        query_plain, query_rotary, query_latent = self._queries(hidden_states, key_value_states)
        latent, key_rotary = self._latents(hidden_states, key_value_states)
        everywhere = gather_from_sequence_parallel_region(latent, group=self.tp_group) if self.config.sequence_parallel else latent
        key_up, _ = self._up_projections()
        query = torch.cat([torch.einsum("...hd,hdr->...hr", query_plain, key_up), query_rotary], dim=-1)
        key = torch.cat([everywhere.unsqueeze(-2), key_rotary], dim=-1)
        if packed_seq_params is not None:
            query, key = query.squeeze(1), key.squeeze(1)
        return query, key, None, query_latent, latent

    def _run_core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: None,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        attn_mask_type: AttnMaskType | None = None,
        **indexer_inputs: Any,
    ) -> Tensor:
        """[t, 1, heads * v]."""
        return self.core_attention(
            query,
            key,
            value,
            attention_mask,
            packed_seq_params=packed_seq_params,
            attn_mask_type=attn_mask_type or self.attn_mask_type,
            up_v_weight=self._up_projections()[1],
            **indexer_inputs,
        )

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """From the latent to keys [heads, nope, latent] and to values [heads, v, latent]."""
        weight = self.linear_kv_up_proj.weight.unflatten(0, (self.num_attention_heads_per_partition, -1))
        return weight.split([self.config.qk_head_dim, self.config.v_head_dim], dim=1)


class SharedIndexAttention(DSAttention):
    """DSAttention whose layers choose keys themselves or take an earlier layer's choice, in any order (Megatron: every n-th layer chooses).

    The indexer is frozen: nothing differentiable depends on it.

    Args:
        index_sources: by block (0-based), the block whose indexer chooses its keys; that must run before it on the same rank.
        Others as in DSAttention. Blocks have two stack entries, `layer_number` (1-based) counts entries.
    """

    def __init__(self, *args: Any, layer_number: int, index_sources: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(*args, layer_number=layer_number, **kwargs)
        self.index_share = list(index_sources) != list(range(len(index_sources)))
        self.source_layer = 2 * index_sources[(layer_number - 1) // 2] + 1
        self.skip_topk = self.source_layer != layer_number
        if self.skip_topk:
            self.indexer = None
        else:
            self.indexer.requires_grad_(False)
