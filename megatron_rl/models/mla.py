"""What families with multi-head latent attention share: table rows, config fields, checks (DeepSeek-V2, arXiv:2405.04434). No torch import.

Queries come from a low-rank latent (or straight from the hidden state), keys and values of all heads from another; a small part of each
head carries the positions. Weights are laid out head by head on both sides, so that every row is an identity.
"""

from typing import Any

from megatron_rl.models import dense, rope
from megatron_rl.models.family import HFConfig, HFTensor, TensorRule

_ATTENTION = "decoder.layers.{attention}."
_BLOCK = "model.layers.{layer}."
_REQUIRED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _low_rank_queries(hf: HFConfig, layer: int) -> bool:
    return hf.get("q_lora_rank") is not None


ATTENTION = (
    TensorRule(_ATTENTION + "input_layernorm.weight", (HFTensor(_BLOCK + "input_layernorm.weight", ("hidden",)),)),
    TensorRule(
        _ATTENTION + "self_attention.linear_q_proj.weight",
        (HFTensor(_BLOCK + "self_attn.q_proj.weight", ("queries", "hidden")),),
        "column",
        when=lambda hf, layer: not _low_rank_queries(hf, layer),
    ),
    TensorRule(
        _ATTENTION + "self_attention.linear_q_down_proj.weight",
        (HFTensor(_BLOCK + "self_attn.q_a_proj.weight", ("query_rank", "hidden")),),
        when=_low_rank_queries,
    ),
    TensorRule(
        _ATTENTION + "self_attention.q_layernorm.weight",
        (HFTensor(_BLOCK + "self_attn.q_a_layernorm.weight", ("query_rank",)),),
        when=_low_rank_queries,
    ),
    TensorRule(
        _ATTENTION + "self_attention.linear_q_up_proj.weight",
        (HFTensor(_BLOCK + "self_attn.q_b_proj.weight", ("queries", "query_rank")),),
        "column",
        when=_low_rank_queries,
    ),
    TensorRule(
        _ATTENTION + "self_attention.linear_kv_down_proj.weight",
        (HFTensor(_BLOCK + "self_attn.kv_a_proj_with_mqa.weight", ("latent_and_rotary", "hidden")),),
    ),
    TensorRule(_ATTENTION + "self_attention.kv_layernorm.weight", (HFTensor(_BLOCK + "self_attn.kv_a_layernorm.weight", ("latent",)),)),
    TensorRule(
        _ATTENTION + "self_attention.linear_kv_up_proj.weight",
        (HFTensor(_BLOCK + "self_attn.kv_b_proj.weight", ("keys_and_values", "latent")),),
        "column",
    ),
    TensorRule(
        _ATTENTION + "self_attention.linear_proj.weight", (HFTensor(_BLOCK + "self_attn.o_proj.weight", ("hidden", "values")),), "row"
    ),
)


def check(hf: HFConfig) -> list[str]:
    """Config values outside of what these layers compute, one line each."""
    problems = dense.check_fixed(hf, {**dense.FIXED, "attention_bias": False, "num_key_value_heads": hf["num_attention_heads"]})
    return [*problems, *(f"config.json: {field!r} is missing" for field in _REQUIRED if not hf.get(field))]


def transformer(hf: HFConfig) -> dict[str, Any]:
    """MLATransformerConfig fields. The latents' norms have the model's epsilon, as in vLLM; transformers takes 1e-6 for them whatever the
    config says, which differs where rms_norm_eps does."""
    scaling = rope.rope(hf).scaling
    return {
        **dense.transformer(hf),
        "multi_latent_attention": True,
        "num_query_groups": hf["num_attention_heads"],
        "kv_channels": head_width(hf),
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "qk_layernorm": True,
        # Our layers turn queries and keys by their own table; Megatron's part is the factor on the attention logits.
        "rope_type": "rope",
        "rotary_base": rope.rope(hf).theta,
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        "mscale_all_dim": scaling.mscale_all_dim if scaling else 0.0,
    }


def dimensions(hf: HFConfig) -> dict[str, int]:
    """Sizes of the dimensions that the rows above name."""
    heads = hf["num_attention_heads"]
    return {
        "vocab": hf["vocab_size"],
        "hidden": hf["hidden_size"],
        "inner": hf["intermediate_size"],
        "query_rank": hf.get("q_lora_rank") or 0,
        "queries": heads * head_width(hf),
        "latent": hf["kv_lora_rank"],
        "latent_and_rotary": hf["kv_lora_rank"] + hf["qk_rope_head_dim"],
        "keys_and_values": heads * (hf["qk_nope_head_dim"] + hf["v_head_dim"]),
        "values": heads * hf["v_head_dim"],
    }


def head_width(hf: HFConfig) -> int:
    """Width of a head's query and key: the part without and the part with positions."""
    return hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
