"""One name for every tensor, whichever layers hold it and wherever they sit. No torch import.

Canonical names number stack entries and experts over the whole model and give each norm its own place:
    decoder.layers.7.mlp.experts.12.linear_fc1.weight        decoder.layers.6.input_layernorm.weight
Live modules number both within the rank, and layers differ in where they keep things:
    decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight    one module per expert
    decoder.layers.1.mlp.experts.linear_fc1.weight0                   grouped experts (TransformerEngine)
    decoder.layers.0.self_attention.linear_qkv.layer_norm_weight      fused norm and linear (TransformerEngine)
"""

import re

FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Where a fused norm-and-linear keeps the norm. Megatron checkpoints use these keys with either kind of layer."""
FUSED_ENTRIES = ("*", "-")
"""Entries whose norm one linear alone reads, so that TransformerEngine fuses the two."""

_LIVE = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_SEPARATE_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")

_CANONICAL_EXPERT = re.compile(r"(decoder\.layers\.\d+\.)mlp\.experts\.(\d+)\.(.+)")


def canonical_name(live: str, first_entry: int, first_expert: int) -> str:
    """The canonical name of a live module's tensor, on a rank whose chunk begins with stack entry `first_entry` and whose experts
    begin with `first_expert` (both 0-based, over the whole model)."""
    if not (match := _LIVE.fullmatch(live)):
        return live
    entry, rest = int(match[1]) + first_entry, match[2]
    for plain, fused in FUSED_NORMS.items():
        rest = rest.replace(fused, plain)
    if expert := _SEPARATE_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.{int(expert[1]) + first_expert}.{expert[2]}"
    elif expert := _GROUPED_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.{int(expert[3]) + first_expert}.{expert[1]}.{expert[2]}"
    return f"decoder.layers.{entry}.{rest}"


def entry_of(canonical: str) -> int | None:
    """Number of the stack entry a tensor belongs to; None for the embedding, the final norm and the output matrix."""
    match = _LIVE.fullmatch(canonical)
    return int(match[1]) if match else None


def checkpoint_key(canonical: str, symbol: str | None) -> tuple[str, int | None]:
    """The key of a Megatron checkpoint that holds a tensor of an entry of kind `symbol` (`Family.block`; None outside of the stack), and
    for an expert's tensor its row on that key's leading axis, which counts the experts of the model."""
    if symbol in FUSED_ENTRIES:
        for plain, fused in FUSED_NORMS.items():
            canonical = canonical.replace(plain, fused)
    if match := _CANONICAL_EXPERT.fullmatch(canonical):
        return f"{match[1]}mlp.experts.experts.{match[3]}", int(match[2])
    return canonical, None
