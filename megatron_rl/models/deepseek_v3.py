"""DeepSeek-V3 and models of its architecture (the text model of Kimi-K2): latent attention, grouped sigmoid router, shared experts
(arXiv:2412.19437)."""

from megatron_rl.models import dense, mla, moe
from megatron_rl.models.family import Family

FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    check=lambda hf: [*mla.check(hf), *moe.check_deepseek(hf)],
    transformer=lambda hf: {**mla.transformer(hf), **moe.deepseek_transformer(hf)},
    dimensions=lambda hf: {**mla.dimensions(hf), **moe.dimensions(hf)},
    block=lambda hf, layer: "+-" if layer < hf.get("first_k_dense_replace", 3) else "+E",
    entries={
        "+": mla.ATTENTION,
        "-": dense.MLP,
        "E": moe.DEEPSEEK,
    },
    embedding=dense.EMBEDDING,
    head=dense.HEAD,
    rotary_dim=lambda hf: hf["qk_rope_head_dim"],
    rotary_interleaved=lambda hf: hf.get("rope_interleave", True),
    rope_kinds=("default", "yarn"),
    ignored=moe.multi_token_layers,
)
