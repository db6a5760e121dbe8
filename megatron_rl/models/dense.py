"""What dense pre-norm decoders with grouped-query attention and SwiGLU share: table rows, config fields, checks. No torch import."""

from typing import Any

from megatron_rl.models import rope
from megatron_rl.models.family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, HFConfig, HFTensor, TensorRule, head_dim, key_value_heads

_ATTENTION = "decoder.layers.{attention}."
_MLP = "decoder.layers.{mlp}."
_BLOCK = "model.layers.{layer}."

EMBEDDING = (TensorRule(EMBEDDING_WEIGHT, (HFTensor("model.embed_tokens.weight", ("vocab", "hidden")),), "vocab"),)
ATTENTION = (
    TensorRule(_ATTENTION + "input_layernorm.weight", (HFTensor(_BLOCK + "input_layernorm.weight", ("hidden",)),)),
    TensorRule(
        _ATTENTION + "self_attention.linear_qkv.weight",
        (
            HFTensor(_BLOCK + "self_attn.q_proj.weight", ("queries", "hidden")),
            HFTensor(_BLOCK + "self_attn.k_proj.weight", ("keys", "hidden")),
            HFTensor(_BLOCK + "self_attn.v_proj.weight", ("keys", "hidden")),
        ),
        "column",
        "qkv",
    ),
    TensorRule(
        _ATTENTION + "self_attention.linear_qkv.bias",
        (
            HFTensor(_BLOCK + "self_attn.q_proj.bias", ("queries",)),
            HFTensor(_BLOCK + "self_attn.k_proj.bias", ("keys",)),
            HFTensor(_BLOCK + "self_attn.v_proj.bias", ("keys",)),
        ),
        "column",
        "qkv",
        when=lambda hf, _: bool(hf.get("attention_bias")),
    ),
    TensorRule(
        _ATTENTION + "self_attention.linear_proj.weight", (HFTensor(_BLOCK + "self_attn.o_proj.weight", ("hidden", "queries")),), "row"
    ),
)
QK_NORM = (
    TensorRule(_ATTENTION + "self_attention.q_layernorm.weight", (HFTensor(_BLOCK + "self_attn.q_norm.weight", ("head",)),)),
    TensorRule(_ATTENTION + "self_attention.k_layernorm.weight", (HFTensor(_BLOCK + "self_attn.k_norm.weight", ("head",)),)),
)
MLP = (
    TensorRule(_MLP + "pre_mlp_layernorm.weight", (HFTensor(_BLOCK + "post_attention_layernorm.weight", ("hidden",)),)),
    TensorRule(
        _MLP + "mlp.linear_fc1.weight",
        (
            HFTensor(_BLOCK + "mlp.gate_proj.weight", ("inner", "hidden")),
            HFTensor(_BLOCK + "mlp.up_proj.weight", ("inner", "hidden")),
        ),
        "column",
        "gate_up",
    ),
    TensorRule(_MLP + "mlp.linear_fc2.weight", (HFTensor(_BLOCK + "mlp.down_proj.weight", ("hidden", "inner")),), "row"),
)
HEAD = (
    TensorRule("decoder.final_norm.weight", (HFTensor("model.norm.weight", ("hidden",)),)),
    TensorRule(OUTPUT_WEIGHT, (HFTensor("lm_head.weight", ("vocab", "hidden")),), "vocab"),
)

FIXED = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "attention_dropout": 0.0, "pretraining_tp": 1}
"""Values that change what HF computes and that no layer here follows: field -> the only value taken."""


def check(hf: HFConfig) -> list[str]:
    """Config values outside of what these layers compute, one line each."""
    problems = check_fixed(hf, {**FIXED, "attention_bias": False})
    if (factor := rope.partial_rotary_factor(hf)) not in (None, 1.0):
        problems.append(f"config.json: partial_rotary_factor = {factor} is not supported, only 1.0")
    return problems


def check_fixed(hf: HFConfig, fixed: HFConfig = FIXED) -> list[str]:
    """Fields that have another value than the only one taken, one line each."""
    return [
        f"config.json: {field} = {hf[field]!r} is not supported, only {value!r}"
        for field, value in fixed.items()
        if hf.get(field) is not None and hf[field] != value
    ]


def block(hf: HFConfig, layer: int) -> str:
    """Every block is attention and MLP."""
    return "*-"


def transformer(hf: HFConfig) -> dict[str, Any]:
    """TransformerConfig fields."""
    return {
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": key_value_heads(hf),
        "kv_channels": head_dim(hf),
        "layernorm_epsilon": hf["rms_norm_eps"],
        "init_method_std": hf.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def dimensions(hf: HFConfig) -> dict[str, int]:
    """Sizes of the dimensions that the rows above name."""
    return {
        "vocab": hf["vocab_size"],
        "hidden": hf["hidden_size"],
        "inner": hf["intermediate_size"],
        "head": head_dim(hf),
        "queries": hf["num_attention_heads"] * head_dim(hf),
        "keys": key_value_heads(hf) * head_dim(hf),
    }
