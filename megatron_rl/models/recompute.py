"""Which parts of a block a model can recompute in its backward pass. No torch import."""

from collections.abc import Sequence

from megatron_rl.models.family import HFConfig
from megatron_rl.models.registry import family_of

_ENTRIES = {"core_attn": "*", "mlp": "-", "moe": "E", "shared_experts": "E"}
"""Megatron's names to the stack entries that have the module. Its other modules (layernorm, moe_act, mla_up_proj) are recomputed by
code of Megatron's that needs TransformerEngine's."""


def check_recompute(hf: HFConfig, modules: Sequence[str]) -> list[str]:
    """Why these modules of this (supported) model can't be recomputed, one line each."""
    pattern = "".join(family_of(hf).pattern(hf))
    problems = []
    for module in modules:
        if _ENTRIES[module] not in pattern or (module == "shared_experts" and not hf.get("n_shared_experts")):
            why = "; its attention is latent and has no such part" if module == "core_attn" else ""
            problems.append(f"trainer.recompute_modules: the model has no {module!r}{why}; leave it out")
    return problems
