"""Which model is trained and served, and in which numeric type."""

from typing import Literal

from pydantic import Field

from megatron_rl.config.base import Table


class ModelConfig(Table):
    """[model]"""

    path: str
    """HF directory: config.json and safetensors weights."""
    tokenizer: str | None = None
    """HF directory of the tokenizer; default: model.path."""
    context: int = Field(default=2048, ge=2)
    """Longest prompt + answer in tokens, for the engine and for one training sample."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights in trainer and engine. On a CPU without bf16 instructions use float32: bfloat16 is 100 times slower."""

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.path
