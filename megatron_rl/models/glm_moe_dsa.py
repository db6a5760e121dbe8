"""GLM-5: DeepSeek-V3's latent attention and experts, with sparse attention (DSA) whose choice of keys some blocks share."""

from typing import Any

from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.models import dense, mla, moe
from megatron_rl.models.family import Family, HFConfig, HFTensor, TensorRule

_INDEXER = "decoder.layers.{attention}.self_attention.core_attention.indexer."
_HF_INDEXER = "model.layers.{layer}.self_attn.indexer."
_REQUIRED = ("q_lora_rank", "index_topk", "index_head_dim", "index_n_heads")


def index_sources(hf: HFConfig) -> tuple[int, ...]:
    """By block, the block whose indexer chooses its keys: itself ("full"), or the last full one before it ("shared")."""
    sources: list[int] = []
    for layer, kind in enumerate(_indexer_types(hf)):
        sources.append(layer if kind == "full" else sources[-1])
    return tuple(sources)


def _indexer_types(hf: HFConfig) -> list[str]:
    if types := hf.get("indexer_types"):
        return types
    if pattern := hf.get("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every, first = max(hf.get("index_topk_freq") or 1, 1), hf.get("index_skip_topk_offset", 2)
    return ["shared" if max(layer - first + 1, 0) % every else "full" for layer in range(hf["num_hidden_layers"])]


def _has_indexer(hf: HFConfig, layer: int) -> bool:
    return _indexer_types(hf)[layer] == "full"


INDEXER = tuple(
    TensorRule(_INDEXER + megatron, (HFTensor(_HF_INDEXER + name, dims),), when=_has_indexer)
    for megatron, name, dims in (
        ("linear_wq_b.weight", "wq_b.weight", ("index_queries", "query_rank")),
        ("linear_wk.weight", "wk.weight", ("index_head", "hidden")),
        ("k_norm.weight", "k_norm.weight", ("index_head",)),
        ("k_norm.bias", "k_norm.bias", ("index_head",)),
        ("linear_weights_proj.weight", "weights_proj.weight", ("index_heads", "hidden")),
    )
)


def _check(hf: HFConfig) -> list[str]:
    # vLLM takes the indexer's rotary pairs for halves where the config does not say; on GLM-5 they are neighbours.
    problems = [*mla.check(hf), *dense.check_fixed(hf, {"indexer_rope_interleave": True}), *moe.check_deepseek(hf)]
    problems += [f"config.json: {field!r} is missing" for field in _REQUIRED if not hf.get(field)]
    layers = hf["num_hidden_layers"]
    for field, known, kinds in (
        ("indexer_types", {"full", "shared"}, _indexer_types(hf)),
        ("mlp_layer_types", {"dense", "sparse"}, _mlp_types(hf)),
    ):
        if len(kinds) != layers or set(kinds) - known:
            problems.append(f"config.json: {field} must name one of {sorted(known)} for each of the {layers} layers")
    if _indexer_types(hf)[:1] == ["shared"]:
        problems.append("config.json: the first layer's indexer is 'shared', but no layer before it has one")
    return problems


def _check_layout(hf: HFConfig, parallel: ParallelConfig) -> list[str]:
    problems = []
    if parallel.context_parallel > 1 and parallel.context_parallel_kind != "all_gather":
        problems.append(
            f"[trainer.parallel] context_parallel_kind = {parallel.context_parallel_kind!r} is not supported with sparse attention, "
            "where any query may need any key; choose 'all_gather'"
        )
    sources = index_sources(hf)
    if shared := [cut for cut in parallel.chunk_bounds(len(sources))[1:-1] if sources[cut] != cut]:
        own = [layer for layer, source in enumerate(sources) if layer and source == layer]
        remedy = (
            f"say in pipeline_layers how many layers each chunk has, such that each begins with one of layers {own}"
            if len(own) >= parallel.chunks - 1
            else f"only layers {own} can begin one: lower pipeline_parallel x virtual_pipeline_parallel to {len(own) + 1} or less"
        )
        problems.append(
            f"[trainer.parallel] {parallel.chunks} pipeline chunks cut before layers {shared}, which share the keys that an earlier layer "
            f"chose; {remedy}"
        )
    return problems


def _mlp_types(hf: HFConfig) -> list[str]:
    dense_layers = hf.get("first_k_dense_replace", 3)
    return hf.get("mlp_layer_types") or ["dense" if layer < dense_layers else "sparse" for layer in range(hf["num_hidden_layers"])]


def _transformer(hf: HFConfig) -> dict[str, Any]:
    return {
        **mla.transformer(hf),
        **moe.deepseek_transformer(hf),
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": hf["index_n_heads"],
        "dsa_indexer_head_dim": hf["index_head_dim"],
        "dsa_indexer_topk": hf["index_topk"],
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_scoring_relu": True,
    }


def _dimensions(hf: HFConfig) -> dict[str, int]:
    heads, width = hf["index_n_heads"], hf["index_head_dim"]
    return {
        **mla.dimensions(hf),
        **moe.dimensions(hf),
        "index_heads": heads,
        "index_head": width,
        "index_queries": heads * width,
    }


FAMILY = Family(
    name="glm_moe_dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    check=_check,
    check_layout=_check_layout,
    transformer=_transformer,
    dimensions=_dimensions,
    block=lambda hf, layer: "DE" if _mlp_types(hf)[layer] == "sparse" else "D-",
    entries={
        "D": mla.ATTENTION + INDEXER,
        "-": dense.MLP,
        "E": moe.DEEPSEEK,
    },
    embedding=dense.EMBEDDING,
    head=dense.HEAD,
    rotary_dim=lambda hf: hf["qk_rope_head_dim"],
    rotary_interleaved=lambda hf: True,
    index_sources=index_sources,
    rope_kinds=("default",),
    ignored=moe.multi_token_layers,
    engine_config={"indexer_rope_interleave": True},
)
