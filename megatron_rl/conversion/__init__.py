"""Weights between HF safetensors and live Megatron models, through the family's table.

`hf_io` alone needs no Megatron, so the live side is imported when first asked for.
"""

from typing import Any

__all__ = ["export_tensors", "load_hf", "save_hf"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_rl.conversion import live

    return getattr(live, name)
