"""Llama 2 and 3, and models of the same architecture (SmolLM2): grouped-query attention, SwiGLU, RoPE (plain or "llama3" scaled)."""

from megatron_rl.models import dense
from megatron_rl.models.family import Family, head_dim

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    check=dense.check,
    transformer=dense.transformer,
    dimensions=dense.dimensions,
    block=dense.block,
    entries={"*": dense.ATTENTION, "-": dense.MLP},
    embedding=dense.EMBEDDING,
    head=dense.HEAD,
    rotary_dim=head_dim,
)
