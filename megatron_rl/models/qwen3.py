"""Qwen3 dense models: grouped-query attention with RMSNorm on queries and keys, SwiGLU, RoPE."""

from typing import Any

from megatron_rl.models import dense
from megatron_rl.models.family import Family, HFConfig, head_dim


def _transformer(hf: HFConfig) -> dict[str, Any]:
    return {**dense.transformer(hf), "qk_layernorm": True}


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    check=dense.check,
    transformer=_transformer,
    dimensions=dense.dimensions,
    block=dense.block,
    entries={"*": dense.ATTENTION + dense.QK_NORM, "-": dense.MLP},
    embedding=dense.EMBEDDING,
    head=dense.HEAD,
    rotary_dim=head_dim,
)
