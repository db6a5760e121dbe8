"""Megatron's MoE layer with our router, and on torch without Megatron's permutations where a rank holds every expert whole."""

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_rl.models.layers.router import BalancedRouter


class BalancedMoELayer(MoELayer):
    """MoELayer whose router knows the documents of its tokens."""

    router: BalancedRouter

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As MoELayer; `BalancedRouter.documents` rides in the argument for a padding mask, which the stack hands down."""
        self.router.documents = padding_mask
        return super().forward(hidden_states, intermediate_tensors)


class TorchMoELayer(BalancedMoELayer):
    """Router, dispatcher, experts, shared experts."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.token_dispatcher.ep_size * self.token_dispatcher.tp_size == 1:
            self.token_dispatcher = _LocalDispatcher(config, kwargs["pg_collection"])


class _LocalDispatcher(MoETokenDispatcher):
    """Sorts tokens by expert and adds the results up; nothing is sent. `tokens` holds the rows of the forward pass under way."""

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [t, b, h], routing_map bool and probs float [t b, experts] -> one row per token and expert chosen, expert by expert."""
        self.shape = hidden.shape
        experts, self.tokens = routing_map.t().nonzero(as_tuple=True)
        self.counts = routing_map.sum(dim=0)
        chosen = probs.flatten().gather(0, self.tokens * routing_map.shape[1] + experts)
        return hidden.flatten(0, 1).index_select(0, self.tokens), chosen

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return hidden, self.counts, probs

    def combine_preprocess(self, hidden: Tensor) -> Tensor:
        return hidden

    def token_combine(self, hidden: Tensor) -> Tensor:
        return hidden

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Each token's results in sum, [t, b, h]."""
        out = hidden.new_zeros(self.shape[:-1].numel(), self.shape[-1])
        return out.index_add(0, self.tokens, hidden).view(self.shape)
