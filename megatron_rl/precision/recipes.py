"""Which recipe runs on which GPU, and a recipe as Megatron's config fields.

Megatron itself refuses a recipe that the GPU can't do only in the first forward pass, with the weights loaded and the engines started.
"""

from typing import Any

from megatron_rl.config.precision import PrecisionConfig

Capability = tuple[int, int]
"""CUDA compute capability: A100 (8, 0), L40 (8, 9), H100 and H200 (9, 0), B200 (10, 0)."""

_RUNS_ON: dict[str, tuple[Capability, Capability]] = {
    "delayed": ((8, 9), (99, 0)),
    "current": ((8, 9), (99, 0)),
    "blockwise": ((9, 0), (99, 0)),
    "mxfp8": ((10, 0), (12, 0)),
    "nvfp4": ((10, 0), (99, 0)),
}
"""From the first capability, below the second: TransformerEngine 2.20.2's own checks, on CUDA 13."""
_MEGATRON_NAME = {"delayed": "delayed", "current": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}
_ENTRIES = 2
"""Entries of Megatron's stack per block."""


def check(precision: PrecisionConfig, gpu: str, capability: Capability | None) -> list[str]:
    """Why this recipe cannot run on this GPU, with the remedy; empty when it can. `capability` None: a machine without a GPU."""
    recipe = precision.recipe
    if recipe == "none":
        return []
    if capability is None:
        return [f'precision.recipe = {recipe!r}: needs a GPU, and this machine has none; set precision.recipe = "none"']
    usable = [name for name, (first, end) in _RUNS_ON.items() if first <= capability < end]
    if recipe in usable:
        return []
    remedy = f"use {', '.join(usable)} or none" if usable else 'set precision.recipe = "none"'
    return [f"precision.recipe = {recipe!r}: does not run on {gpu} (compute capability {capability[0]}.{capability[1]}); {remedy}"]


def token_alignment(precision: PrecisionConfig) -> int:
    """Rows of every quantised matrix product are a multiple of this (Megatron's get_fp8_align_size and get_fp4_align_size)."""
    return {"none": 1, "mxfp8": 32, "nvfp4": 128}.get(precision.recipe, 16)


def megatron_fields(precision: PrecisionConfig) -> dict[str, Any]:
    """TransformerConfig fields of a recipe. Parameters stay in the model's type (no fp8_param): updates and weight sync see those."""
    if precision.recipe == "none":
        return {}
    if precision.recipe == "nvfp4":
        fields: dict[str, Any] = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
    else:
        default = "hybrid" if precision.recipe in ("delayed", "current") else "e4m3"
        fields = {"fp8": precision.format or default, "fp8_recipe": _MEGATRON_NAME[precision.recipe]}
    if precision.recipe == "delayed":  # TransformerEngine's own defaults; Megatron's look one step back
        fields |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    if precision.first_layers_bf16 or precision.last_layers_bf16:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": _ENTRIES * precision.first_layers_bf16,
            "num_layers_at_end_in_bf16": _ENTRIES * precision.last_layers_bf16,
        }
    return fields
