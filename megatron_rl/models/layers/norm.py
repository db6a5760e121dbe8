"""RMSNorm on torch, for where TransformerEngine is not."""

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_rl.kernels.rms_norm.reference import rms_norm


class TorchRMSNorm(torch.nn.Module):
    """Megatron's norm builder signature; works under sequence parallel, where each tensor rank sees its share of the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters so marked over the tensor ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        return rms_norm(x, self.weight, self.eps)
