"""GLM-4.5 and models of its architecture (INTELLECT-3): grouped-query attention with partial rotary embedding, DeepSeek-V3's experts."""

from dataclasses import replace
from typing import Any

from megatron_rl.models import dense, moe, rope
from megatron_rl.models.family import Family, HFConfig, head_dim

_QK_NORM = tuple(replace(rule, when=lambda hf, _: bool(hf.get("use_qk_norm"))) for rule in dense.QK_NORM)


def _block(hf: HFConfig, layer: int) -> str:
    return "*-" if layer < hf.get("first_k_dense_replace", 1) else "*E"


def _rotary_dim(hf: HFConfig) -> int:
    factor = rope.partial_rotary_factor(hf)
    return int(head_dim(hf) * (0.5 if factor is None else factor))


def _transformer(hf: HFConfig) -> dict[str, Any]:
    return {
        **dense.transformer(hf),
        **moe.deepseek_transformer(hf),
        "qk_layernorm": bool(hf.get("use_qk_norm")),
        "add_qkv_bias": bool(hf.get("attention_bias")),
    }


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    check=lambda hf: [*dense.check_fixed(hf), *moe.check_deepseek(hf)],
    transformer=_transformer,
    dimensions=lambda hf: {**dense.dimensions(hf), **moe.dimensions(hf)},
    block=_block,
    entries={
        "*": dense.ATTENTION + _QK_NORM,
        "-": dense.MLP,
        "E": moe.DEEPSEEK,
    },
    embedding=dense.EMBEDDING,
    head=dense.HEAD,
    rotary_dim=_rotary_dim,
    ignored=moe.multi_token_layers,
)
