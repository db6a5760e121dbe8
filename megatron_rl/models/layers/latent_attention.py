"""Multi-head latent attention whose positions come from the model's one rotary table, with any provider's linears.

Megatron's MLASelfAttention turns each packed sequence by itself, anew in every layer, and takes only TransformerEngine's linears (or its
own column-parallel one, with a gather) for the projections down to the latents.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules, MultiLatentAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megatron_rl.kernels.rotary.reference import rotate


class LatentAttention(MLASelfAttention):
    """Latent attention over packed sequences (DeepSeek-V2, arXiv:2405.04434): [t / tensor ranks, 1, h] -> the same.

    `rotary_interleaved`: whether neighbouring dimensions make a rotary pair, not the two halves.
    `rotary_pos_emb` of its forward is (cosines, sines), each [t, rotary / 2], of the tokens that all tensor ranks hold together.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        # Not MLASelfAttention's, which accepts no other linears.
        MultiLatentAttention.__init__(
            self, config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection, pp_layer_offset, name
        )
        self.rotary_interleaved = rotary_interleaved
        linear = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        replicated = {**linear, "parallel_mode": "duplicated", "skip_weight_param_allocation": False}
        column = {**linear, "gather_output": False, "is_expert": False, "tp_group": self.tp_group}
        heads, query_rank, latent = config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
        if query_rank is None:
            self.linear_q_proj = submodules.linear_q_proj(config.hidden_size, heads * self.q_head_dim, **column)
        else:
            self.linear_q_down_proj = submodules.linear_q_down_proj(config.hidden_size, query_rank, **replicated)
            self.q_layernorm = submodules.q_layernorm(config=config, hidden_size=query_rank, eps=config.layernorm_epsilon)
            self.linear_q_up_proj = submodules.linear_q_up_proj(query_rank, heads * self.q_head_dim, **column)
        self.linear_kv_down_proj = submodules.linear_kv_down_proj(config.hidden_size, latent + config.qk_pos_emb_head_dim, **replicated)
        self.kv_layernorm = submodules.kv_layernorm(config=config, hidden_size=latent, eps=config.layernorm_epsilon)
        self.linear_kv_up_proj = submodules.linear_kv_up_proj(latent, heads * (config.qk_head_dim + config.v_head_dim), **column)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As MLASelfAttention. The table rides in the argument for key-value states, which self-attention does not have."""
        return super().forward(hidden_states, attention_mask, key_value_states=rotary_pos_emb, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """query and key [t, heads, nope + rotary], value [t, heads, v] (not packed: [s, b, ...]); the query's latent and the keys'
        [t / tensor ranks, 1, rank]."""
        query_plain, query_rotary, query_latent = self._queries(hidden_states, key_value_states)
        latent, key_rotary = self._latents(hidden_states, key_value_states)
        keys_values = self._per_head(self.linear_kv_up_proj(latent)[0])
        key_plain, value = keys_values.split([self.config.qk_head_dim, self.config.v_head_dim], dim=-1)
        query = torch.cat([query_plain, query_rotary], dim=-1)
        key = torch.cat([key_plain, key_rotary.expand(*key_plain.shape[:-1], -1)], dim=-1)
        if packed_seq_params is not None:
            query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        return query, key, value, query_latent, latent

    def _queries(self, hidden: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both parts of every head's query, the second one turned; and what they were projected from (this tensor rank's tokens)."""
        if self.config.q_lora_rank is None:
            latent, query = hidden, self.linear_q_proj(hidden)[0]
        else:
            latent = self.q_layernorm(self.linear_q_down_proj(hidden)[0])
            query = self.linear_q_up_proj(latent)[0]
        plain, rotary = self._per_head(query).split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        return plain, rotate(rotary, *table, self.rotary_interleaved), latent

    def _latents(self, hidden: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """The normed latent of this tensor rank's tokens, and of all tokens the keys' turned part, [t, b, 1, rotary]."""
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, rotary = self.linear_kv_down_proj(hidden)[0].split(widths, dim=-1)
        if self.config.sequence_parallel:
            rotary = gather_from_sequence_parallel_region(rotary, group=self.tp_group)
        return self.kv_layernorm(latent), rotate(rotary.unsqueeze(-2), *table, self.rotary_interleaved)

    def _per_head(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.num_attention_heads_per_partition, -1))
