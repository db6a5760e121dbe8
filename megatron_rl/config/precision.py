"""In which numbers the trainer multiplies matrices."""

from typing import Literal

from pydantic import Field, model_validator

from megatron_rl.config.base import Table


class PrecisionConfig(Table):
    """[precision] 8-bit and 4-bit matrix products in the trainer's attention, MLP and expert linears, by TransformerEngine (GPUs only).
    Weights, gradients and optimizer stay in their types; router, embedding, head and norms are not quantised."""

    recipe: Literal["none", "delayed", "current", "blockwise", "mxfp8", "nvfp4"] = "none"
    """Scales: of past steps (delayed), of the tensor (current), of 128 x 128 weights and 1 x 128 activations (blockwise), of 32 values
    (mxfp8), of 16 four-bit values (nvfp4)."""
    format: Literal["e4m3", "hybrid"] | None = None
    """8-bit numbers: e4m3 throughout, or e5m2 for gradients (hybrid). Absent: hybrid for delayed and current, else e4m3."""
    first_layers_bf16: int = Field(default=0, ge=0)
    """Blocks at the bottom of the model that stay in bfloat16."""
    last_layers_bf16: int = Field(default=0, ge=0)
    """Blocks at the top of the model that stay in bfloat16."""

    @model_validator(mode="after")
    def _has_effect(self) -> "PrecisionConfig":
        blocks = self.first_layers_bf16 or self.last_layers_bf16
        if self.recipe == "none" and (blocks or self.format):
            raise ValueError("recipe = 'none' quantises nothing; leave format and first_ and last_layers_bf16 out, or choose a recipe")
        if self.recipe == "delayed" and blocks:
            raise ValueError("recipe = 'delayed' scales all layers together; use recipe = 'current' to keep some in bfloat16")
        if self.recipe == "nvfp4" and self.format:
            raise ValueError(f"format = {self.format!r} is about 8-bit recipes; leave it out with recipe = 'nvfp4'")
        return self
