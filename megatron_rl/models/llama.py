"""Llama 2 and 3, and models of the same architecture (SmolLM2): grouped-query attention, SwiGLU, RoPE (plain or "llama3" scaled)."""

from megatron_rl.models import dense
from megatron_rl.models.family import Family

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    check=dense.check,
    transformer=dense.transformer,
    dimensions=dense.dimensions,
    rules=dense.EMBEDDING + dense.ATTENTION + dense.MLP + dense.HEAD,
)
