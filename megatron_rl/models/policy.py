"""A rank's share of the model being trained, and how it is built from an HF config."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_rl import platform, precision
from megatron_rl.config.base import ConfigError
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.trainer import ParallelConfig, TrainerConfig
from megatron_rl.models import layer_spec, rope
from megatron_rl.models.family import Family, HFConfig, padded_vocab, tied
from megatron_rl.models.language_model import LanguageModel
from megatron_rl.models.layers import backend
from megatron_rl.models.layers.router import BalancedRouter
from megatron_rl.models.recompute import check_recompute
from megatron_rl.models.registry import check_supported, family_of

_CONTEXT_PARALLEL = {"all_gather": "all_gather", "ring": "p2p", "ulysses": "a2a"}
"""Our names to Megatron's and TransformerEngine's."""


@dataclass(frozen=True)
class Policy:
    """What conversion and the trainer need of a model."""

    chunks: list[LanguageModel]
    """This rank's model chunks in virtual-pipeline order; one without virtual pipeline."""
    config: TransformerConfig
    hf_config: HFConfig
    family: Family
    parallel: ParallelConfig
    dtype: torch.dtype
    token_alignment: int
    """A micro-batch has a multiple of this many tokens on every context rank."""
    trains_routers: bool
    """Whether there are routers and they are trained."""
    aux_loss_coefficient: float

    def routers(self) -> list[BalancedRouter]:
        """Of this rank's layers."""
        return [module for chunk in self.chunks for module in chunk.modules() if isinstance(module, BalancedRouter)]


def build_policy(hf: HFConfig, trainer: TrainerConfig, dtype: str, low_precision: PrecisionConfig) -> Policy:
    """See `models.build`."""
    if problems := check_supported(hf, trainer.parallel) or check_recompute(hf, trainer.recompute_modules):
        raise ConfigError(*problems)
    family = family_of(hf)
    config = transformer_config(hf, family, trainer, getattr(torch, dtype), low_precision)
    chunks = [
        _build_chunk(number, config, family, hf, trainer).to(platform.device())
        for number in range(trainer.parallel.virtual_pipeline_parallel)
    ]
    if not trainer.moe.train_router:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith(".mlp.router.weight"):
                    parameter.requires_grad = False
    return Policy(
        chunks=chunks,
        config=config,
        hf_config=hf,
        family=family,
        parallel=trainer.parallel,
        dtype=config.params_dtype,
        token_alignment=precision.token_alignment(low_precision),
        trains_routers=trainer.moe.train_router and family.has_experts(hf),
        aux_loss_coefficient=trainer.moe.aux_loss_coefficient,
    )


def _build_chunk(number: int, config: TransformerConfig, family: Family, hf: HFConfig, trainer: TrainerConfig) -> LanguageModel:
    """Chunk `number` of this stage; the stack's segments go round the stages, chunk by chunk."""
    parallel, pattern = trainer.parallel, family.pattern(hf)
    blocks = ["".join(pattern[start:end]) for start, end in itertools.pairwise(parallel.chunk_bounds(len(pattern)))]
    stage = {"ignore_virtual": False, "vp_stage": number}
    rotary_dim = family.rotary_dim(hf)
    return LanguageModel(
        config,
        hybrid_stack_spec=layer_spec.stack_spec(config, backend.provider(), family.rotary_interleaved(hf), family.index_sources(hf)),
        hybrid_layer_pattern="|".join(blocks),
        vocab_size=hf["vocab_size"],
        padded_vocab_size=padded_vocab(hf, parallel.tensor_parallel),
        max_sequence_length=hf.get("max_position_embeddings", 2048),
        rotary_percent=rotary_dim / config.kv_channels,
        inverse_frequencies=rope.rope(hf).inverse_frequencies(rotary_dim),
        head_chunk_tokens=trainer.head_chunk_tokens,
        offload_activations=trainer.offload_activations,
        share_embeddings_and_output_weights=tied(hf),
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=number if parallel.virtual_pipeline_parallel > 1 else None,
    )


def transformer_config(
    hf: HFConfig, family: Family, trainer: TrainerConfig, dtype: torch.dtype, low_precision: PrecisionConfig
) -> TransformerConfig:
    """Megatron's config of this model: one layer per entry of the stack, two entries per block.

    Gradients are sums: with calculate_per_token_loss neither DDP nor the schedule divides them by ranks or micro-batches.
    """
    parallel = trainer.parallel
    fields = family.transformer(hf) | platform.transformer_defaults() | precision.megatron_fields(low_precision)
    if trainer.recompute == "full":
        # One block (attention and MLP entries) is the unit that is recomputed.
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    if trainer.recompute == "selective":
        fields |= {"recompute_granularity": "selective", "recompute_modules": list(trainer.recompute_modules)}
    config = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    return config(
        num_layers=2 * hf["num_hidden_layers"],
        is_hybrid_model=True,
        activation_func=F.silu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_parallel if parallel.virtual_pipeline_parallel > 1 else None,
        context_parallel_size=parallel.context_parallel,
        cp_comm_type=_CONTEXT_PARALLEL[parallel.context_parallel_kind],
        expert_model_parallel_size=parallel.expert_parallel,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel or parallel.tensor_parallel,
        sequence_parallel=parallel.tensor_parallel > 1,
        # Packs differ in length, and stages must agree on each one's.
        variable_seq_lengths=parallel.pipeline_parallel > 1,
        # With two stages, batched sends and receives of the interleaved schedule would mix up its chunks (silently wrong gradients).
        overlap_p2p_comm=parallel.virtual_pipeline_parallel > 1,
        batch_p2p_comm=parallel.virtual_pipeline_parallel == 1,
        moe_token_dispatcher_type=trainer.moe.token_dispatcher,
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **fields,
    )
