"""Layers that every tensor rank holds whole, for where TransformerEngine is not."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class ReplicatedLinear(torch.nn.Module):
    """What TransformerEngine's linear with parallel_mode "duplicated" is: no communication. Under sequence parallel each tensor rank
    applies it to its share of the tokens, and Megatron sums the gradients of parameters so marked."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Callable[[Tensor], Any], **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., input_size] -> ([..., output_size], no bias)."""
        return F.linear(x, self.weight), None


class TorchLayerNorm(torch.nn.LayerNorm):
    """LayerNorm with bias, of Megatron's norm builder signature; for inputs that every tensor rank has whole."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
