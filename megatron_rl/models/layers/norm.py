"""RMSNorm on torch, for where TransformerEngine is not."""

import torch
from megatron.core.transformer import TransformerConfig


class TorchRMSNorm(torch.nn.RMSNorm):
    """Megatron's norm builder signature; works under sequence parallel, where each tensor rank sees its share of the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Megatron sums the gradients of parameters so marked over the tensor ranks.
        self.weight.sequence_parallel = config.sequence_parallel
