"""What mixture-of-experts blocks share: table rows, config fields, checks. No torch import."""

from typing import Any

from megatron_rl.models import dense
from megatron_rl.models.family import HFConfig, HFTensor, TensorRule

_MLP = "decoder.layers.{mlp}."
_BLOCK = "model.layers.{layer}."

NORM = TensorRule(_MLP + "pre_mlp_layernorm.weight", (HFTensor(_BLOCK + "post_attention_layernorm.weight", ("hidden",)),))
ROUTER = TensorRule(_MLP + "mlp.router.weight", (HFTensor(_BLOCK + "mlp.gate.weight", ("experts", "hidden")),))
ROUTER_BIAS = TensorRule(
    _MLP + "mlp.router.expert_bias", (HFTensor(_BLOCK + "mlp.gate.e_score_correction_bias", ("experts",)),), dtype="float32"
)
EXPERTS = (
    TensorRule(
        _MLP + "mlp.experts.{expert}.linear_fc1.weight",
        (
            HFTensor(_BLOCK + "mlp.experts.{expert}.gate_proj.weight", ("expert_inner", "hidden")),
            HFTensor(_BLOCK + "mlp.experts.{expert}.up_proj.weight", ("expert_inner", "hidden")),
        ),
        "column",
        "gate_up",
    ),
    TensorRule(
        _MLP + "mlp.experts.{expert}.linear_fc2.weight",
        (HFTensor(_BLOCK + "mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_inner")),),
        "row",
    ),
)
SHARED_EXPERTS = (
    TensorRule(
        _MLP + "mlp.shared_experts.linear_fc1.weight",
        (
            HFTensor(_BLOCK + "mlp.shared_experts.gate_proj.weight", ("shared_inner", "hidden")),
            HFTensor(_BLOCK + "mlp.shared_experts.up_proj.weight", ("shared_inner", "hidden")),
        ),
        "column",
        "gate_up",
        when=lambda hf, _: bool(hf.get("n_shared_experts")),
    ),
    TensorRule(
        _MLP + "mlp.shared_experts.linear_fc2.weight",
        (HFTensor(_BLOCK + "mlp.shared_experts.down_proj.weight", ("hidden", "shared_inner")),),
        "row",
        when=lambda hf, _: bool(hf.get("n_shared_experts")),
    ),
)
DEEPSEEK = (NORM, ROUTER, ROUTER_BIAS, *SHARED_EXPERTS, *EXPERTS)
"""Rows of a block with DeepSeek-V3's router."""

_DEEPSEEK_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Fields that only some of these models' configs have: field -> the only value taken."""


def experts(hf: HFConfig) -> int:
    """Routed experts of a MoE block, in any of HF's spellings; 0 where the config names none."""
    return hf.get("num_experts") or hf.get("n_routed_experts") or hf.get("num_local_experts") or 0


def transformer(hf: HFConfig) -> dict[str, Any]:
    """TransformerConfig fields of every router and expert here: no auxiliary loss, no token dropped, routing in float32."""
    return {
        "num_moe_experts": experts(hf),
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def deepseek_transformer(hf: HFConfig) -> dict[str, Any]:
    """Fields of DeepSeek-V3's router (GLM has the same): sigmoid scores, chosen by score + bias (kept as loaded), weighted by the
    normalised score times a factor; shared experts beside (arXiv:2412.19437, section 2.1.2)."""
    groups = hf["n_group"]
    return {
        **transformer(hf),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": hf["topk_group"] if groups > 1 else None,
        "moe_shared_expert_intermediate_size": shared_inner(hf) or None,
    }


def shared_inner(hf: HFConfig) -> int:
    """Width of the shared experts together."""
    return (hf.get("n_shared_experts") or 0) * hf["moe_intermediate_size"]


def multi_token_layers(hf: HFConfig) -> tuple[str, ...]:
    """Prefixes of the tensors of multi-token prediction: blocks after the model's own, which the policy does not use."""
    layers, more = hf["num_hidden_layers"], hf.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + more))


def dimensions(hf: HFConfig) -> dict[str, int]:
    """Sizes of the dimensions that the rows above name."""
    return {"experts": experts(hf), "expert_inner": hf["moe_intermediate_size"], "shared_inner": shared_inner(hf)}


def check(hf: HFConfig) -> list[str]:
    """What a MoE config lacks, one line each."""
    problems = [f"config.json: {field!r} is missing" for field in ("moe_intermediate_size", "num_experts_per_tok") if not hf.get(field)]
    if not experts(hf):
        problems.append("config.json: the number of experts is missing (num_experts, n_routed_experts or num_local_experts)")
    elif not problems and hf["num_experts_per_tok"] > experts(hf):
        problems.append(f"config.json: num_experts_per_tok = {hf['num_experts_per_tok']} is more than the {experts(hf)} experts")
    return problems


def check_deepseek(hf: HFConfig) -> list[str]:
    """Settings of DeepSeek-V3's router that Megatron's computes otherwise, one line each."""
    # transformers' own defaults of these differ from family to family, and no weight shows them.
    silent = [field for field in ("routed_scaling_factor", "n_group", "topk_group") if hf.get(field) is None]
    problems = [*check(hf), *(f"config.json: {field!r} is missing" for field in silent), *dense.check_fixed(hf, _DEEPSEEK_FIXED)]
    if problems:
        return problems
    if not hf.get("norm_topk_prob", True):
        problems.append("config.json: norm_topk_prob = false is not supported with a sigmoid router")
    if hf["num_experts_per_tok"] == 1:
        problems.append(
            "config.json: num_experts_per_tok = 1 is not supported with a sigmoid router, whose weights would not be normalised"
        )
    groups, chosen = hf["n_group"], hf["topk_group"]
    # HF scores a group by its two best experts, Megatron by its num_experts_per_tok / topk_group best.
    if groups > 1 and hf["num_experts_per_tok"] != 2 * chosen:
        problems.append(
            f"config.json: num_experts_per_tok = {hf['num_experts_per_tok']} with topk_group = {chosen} is not supported: "
            f"with n_group > 1 it must be twice topk_group"
        )
    return problems
