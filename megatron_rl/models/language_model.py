"""One pipeline stage of a causal language model: embedding, layer stack, log-prob head."""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_rl import platform
from megatron_rl.kernels.lm_head.reference import log_probs_and_entropy
from megatron_rl.models.layers.attention import sequence_offsets
from megatron_rl.models.layers.offload import offloaded_activations
from megatron_rl.models.layers.self_attention import rotary_table


class LanguageModel(HybridModel):
    """Megatron's HybridModel whose last stage returns log-probabilities instead of logits.

    Args:
        vocab_size: tokens of the tokenizer's vocabulary; rows up to `padded_vocab_size` are padding.
        inverse_frequencies: [rotary_dim / 2] float32, of the rotary embedding.
        head_chunk_tokens: tokens whose logits exist at a time.
        offload_activations: whether what the stack keeps for its backward pass lies in host memory.
        Others as in HybridModel.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        inverse_frequencies: Tensor,
        head_chunk_tokens: int,
        offload_activations: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, vocab_size=padded_vocab_size, position_embedding_type="rope", parallel_output=True, **kwargs)
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)
        if not config.multi_latent_attention:
            self.rotary_pos_emb.inv_freq = inverse_frequencies.to(self.rotary_pos_emb.inv_freq.device)
        self.unpadded_vocab_size = vocab_size
        self.head_chunk_tokens = head_chunk_tokens
        self.offload_activations = offload_activations

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        temperatures: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run this stage on this context rank's tokens.

        Args:
            input_ids, position_ids, labels: [1, t] int64. With packed sequences t is this context rank's zigzag share of the pack
                (models.layers.context_parallel), and t is a multiple of tensor_parallel. Rotary positions restart in every sequence of
                `packed_seq_params`; `position_ids` must say the same.
            temperatures: [1, t] float32 > 0.
            packed_seq_params: qkv_format "thd", cu_seqlens of the whole pack (all context ranks), covering every token.
            documents: [2, t] int64 for the routers' load-balancing loss (`models.layers.router`).

        Returns:
            On the last stage (logprobs [t], entropy [t]) float32: of labels[i] given the tokens up to input_ids[i]. On other stages the
            hidden states [t / tensor_parallel, 1, h] for the next one.
        """
        if documents is not None and self.config.sequence_parallel:
            documents = documents.chunk(self.pg_collection.tp.size(), dim=1)[self.pg_collection.tp.rank()]
        hidden = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        with offloaded_activations() if self.offload_activations else nullcontext():
            hidden = self.decoder(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=self._rotary_embedding(position_ids, packed_seq_params),
                packed_seq_params=packed_seq_params,
                padding_mask=documents,
            )
        return self._head(hidden, labels, temperatures) if self.post_process else hidden

    def _rotary_embedding(self, position_ids: Tensor, packed: PackedSeqParams | None) -> Tensor:
        if platform.layer_backend() == "torch" or self.config.multi_latent_attention:
            return rotary_table(position_ids, self.inverse_frequencies, self.config.params_dtype)
        if packed is None:
            return self.rotary_pos_emb(position_ids.shape[1] * self.pg_collection.cp.size())
        # Angles, one row per token of the whole pack: Megatron then takes each sequence's rows at its offset, in this rank's zigzag
        # order. (It would take them from the sequence's start if the number of rows were not the number of tokens.)
        offsets = sequence_offsets(packed).long()
        lengths = offsets.diff()
        positions = torch.arange(int(offsets[-1]), device=offsets.device) - offsets[:-1].repeat_interleave(lengths)
        return self.rotary_pos_emb.get_emb(int(lengths.max()))[positions]

    def _head(self, hidden: Tensor, labels: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        group = self.pg_collection.tp
        # Each tensor rank's head gives a share of the hidden gradient; the backward of these two sums the shares.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        return log_probs_and_entropy(
            hidden.flatten(0, 1),
            weight,
            labels.flatten(),
            temperatures.flatten(),
            vocab_start=group.rank() * weight.shape[0],
            vocab_size=self.unpadded_vocab_size,
            chunk_tokens=self.head_chunk_tokens,
            group=group,
        )
