"""A rank's share of the model being trained, and how it is built from an HF config."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron_rl import platform
from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.models import layer_spec, rope
from megatron_rl.models.family import Family, HFConfig, head_dim, padded_vocab, tied
from megatron_rl.models.language_model import LanguageModel
from megatron_rl.models.layers import backend
from megatron_rl.models.registry import check_supported, family_of


@dataclass(frozen=True)
class Policy:
    """What conversion and the trainer need of a model."""

    chunks: list[LanguageModel]
    """This rank's model chunks in virtual-pipeline order; one without virtual pipeline."""
    config: TransformerConfig
    hf_config: HFConfig
    family: Family
    dtype: torch.dtype


def build_policy(hf: HFConfig, parallel: ParallelConfig, dtype: str, recompute: str, head_chunk_tokens: int) -> Policy:
    """See `models.build`."""
    if problems := check_supported(hf, parallel):
        raise ConfigError(*problems)
    family = family_of(hf)
    config = transformer_config(hf, family, parallel, getattr(torch, dtype), recompute)
    layers_per_stage = hf["num_hidden_layers"] // parallel.pipeline_parallel
    model = LanguageModel(
        config,
        hybrid_stack_spec=layer_spec.stack_spec(config, backend.provider()),
        hybrid_layer_pattern="|".join(["*-" * layers_per_stage] * parallel.pipeline_parallel),
        vocab_size=hf["vocab_size"],
        padded_vocab_size=padded_vocab(hf, parallel.tensor_parallel),
        max_sequence_length=hf.get("max_position_embeddings", 2048),
        inverse_frequencies=rope.rope(hf).inverse_frequencies(head_dim(hf)),
        head_chunk_tokens=head_chunk_tokens,
        share_embeddings_and_output_weights=tied(hf),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return Policy([model.to(platform.device())], config, hf, family, config.params_dtype)


def transformer_config(hf: HFConfig, family: Family, parallel: ParallelConfig, dtype: torch.dtype, recompute: str) -> TransformerConfig:
    """Megatron's config of this model: one layer per entry of the stack, two entries per block.

    Gradients are sums: with calculate_per_token_loss neither DDP nor the schedule divides them by ranks or micro-batches.
    """
    fields = family.transformer(hf) | platform.transformer_defaults()
    if recompute == "full":
        # One block (attention and MLP entries) is the unit that is recomputed.
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    return TransformerConfig(
        num_layers=2 * hf["num_hidden_layers"],
        is_hybrid_model=True,
        activation_func=F.silu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel,
        context_parallel_size=parallel.context_parallel,
        sequence_parallel=parallel.tensor_parallel > 1,
        # Packs differ in length, and stages must agree on each one's.
        variable_seq_lengths=parallel.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **fields,
    )
