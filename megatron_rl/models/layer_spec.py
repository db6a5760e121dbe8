"""The layer stack as a Megatron spec: two entries per block (attention, MLP), from any layer provider."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer, DSAIndexerSubmodules, DSAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer, TransformerLayerSubmodules

from megatron_rl.models.layers.backend import TorchProvider, moe_layer, self_attention
from megatron_rl.models.layers.latent_attention import LatentAttention
from megatron_rl.models.layers.router import BalancedRouter
from megatron_rl.models.layers.sparse_attention import SharedIndexAttention, SparseLatentAttention
from megatron_rl.models.naming import FUSED_NORMS


class LanguageStack(HybridStack):
    """HybridStack whose final norm comes from the spec (upstream hard-wires TransformerEngine's)."""

    def __init__(self, config: TransformerConfig, *args: Any, final_norm: LayerNormBuilder, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def stack_spec(
    config: TransformerConfig, layers: BackendSpecProvider, rotary_interleaved: bool, index_sources: tuple[int, ...]
) -> ModuleSpec:
    """Spec of `LanguageStack` with the pattern symbols `*` (attention), `+` (latent attention), `D` (sparse latent attention), `-` (MLP)
    and `E` (experts). `rotary_interleaved` and `index_sources` as in Family."""
    fused = layers.fuse_layernorm_and_linear()
    norm = layers.layer_norm(rms_norm=True)
    entry_norm = IdentityOp if fused else norm
    first_linear = layers.column_parallel_layer_norm_linear() if fused else layers.column_parallel_linear()
    head_norm = layers.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    attention = TransformerLayerSubmodules(
        input_layernorm=entry_norm,
        self_attention=ModuleSpec(
            module=self_attention(layers),
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=first_linear,
                core_attention=layers.core_attention(),
                linear_proj=layers.row_parallel_linear(),
                q_layernorm=head_norm,
                k_layernorm=head_norm,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=FUSED_NORMS,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=entry_norm,
        mlp=partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(first_linear, layers.row_parallel_linear(), layers.activation_func())),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=FUSED_NORMS,
    )
    moe = get_moe_module_spec_for_backend(layers, config.num_moe_experts or 1, moe_grouped_gemm=True)
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm,
        mlp=partial(moe_layer(layers), submodules=replace(moe.keywords["submodules"], router=BalancedRouter)),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(
        module=LanguageStack,
        params={"final_norm": norm},
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mla_layer=_latent_attention(layers, rotary_interleaved, LatentAttention, layers.core_attention()),
            dsa_layer=_latent_attention(layers, rotary_interleaved, SparseLatentAttention, _sparse_attention(index_sources)),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
        ),
    )


def _latent_attention(
    layers: BackendSpecProvider, rotary_interleaved: bool, module: type[LatentAttention], core_attention: ModuleSpec | type
) -> ModuleSpec:
    """No norm is fused: two linears read the entry's, and names are the same with every provider."""
    norm, column = layers.layer_norm(rms_norm=True, for_qk=True), layers.column_parallel_linear()
    attention = ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal, "rotary_interleaved": rotary_interleaved},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=layers.linear(),
            linear_q_up_proj=column,
            linear_kv_down_proj=layers.linear(),
            linear_kv_up_proj=column,
            core_attention=core_attention,
            linear_proj=layers.row_parallel_linear(),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=layers.layer_norm(rms_norm=True), self_attention=attention, self_attn_bda=get_bias_dropout_add
        ),
    )


def _sparse_attention(index_sources: tuple[int, ...]) -> ModuleSpec:
    plain = TorchProvider()  # TransformerEngine's layers would be quantised: see precision/ignore.py
    linear, norm = plain.linear(), plain.layer_norm(rms_norm=False)
    indexer = DSAIndexerSubmodules(linear_wq_b=linear, linear_wk=linear, k_norm=norm, linear_weights_proj=linear)
    return ModuleSpec(
        module=SharedIndexAttention,
        params={"index_sources": index_sources},
        submodules=DSAttentionSubmodules(indexer=ModuleSpec(module=DSAIndexer, submodules=indexer)),
    )
