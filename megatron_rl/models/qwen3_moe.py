"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's attention, a softmax router over many small experts, no shared expert."""

from typing import Any

from megatron_rl.models import dense, moe
from megatron_rl.models.family import Family, HFConfig, head_dim


def _block(hf: HFConfig, layer: int) -> str:
    sparse = layer not in (hf.get("mlp_only_layers") or ()) and (layer + 1) % (hf.get("decoder_sparse_step") or 1) == 0
    return "*E" if sparse else "*-"


def _check(hf: HFConfig) -> list[str]:
    problems = [*dense.check(hf), *moe.check(hf)]
    if hf.get("norm_topk_prob") and hf.get("num_experts_per_tok") == 1:
        problems.append("config.json: num_experts_per_tok = 1 with norm_topk_prob is not supported: the router's weight would always be 1")
    return problems


def _transformer(hf: HFConfig) -> dict[str, Any]:
    # Softmax over the chosen experts' scores is the softmax over all, normalised; without norm_topk_prob it comes before the choice.
    return {
        **dense.transformer(hf),
        **moe.transformer(hf),
        "qk_layernorm": True,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
    }


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    check=_check,
    transformer=_transformer,
    dimensions=lambda hf: {**dense.dimensions(hf), **moe.dimensions(hf)},
    block=_block,
    entries={"*": dense.ATTENTION + dense.QK_NORM, "-": dense.MLP, "E": (moe.NORM, moe.ROUTER, *moe.EXPERTS)},
    embedding=dense.EMBEDDING,
    head=dense.HEAD,
    rotary_dim=head_dim,
)
