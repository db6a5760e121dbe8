"""Megatron's router with a load-balancing loss of every document, whose gradient does not depend on how the step was cut up.

For a document of T tokens, N experts of which K take a token, and scores s' normalised to a sum of 1 (DeepSeek-V3, arXiv:2412.19437,
equations 17 to 20; for softmax routers s' is the softmax):
    L = sum_i f_i P_i,     f_i = N / (K T) sum_t [i among the K largest of s'_t],     P_i = 1 / T sum_t s'_ti
The step's loss grows by coefficient / documents * sum of L over documents and layers. f has no gradient, so a rank needs others' tokens
for f and T alone: it adds the share of its own tokens, and shares add up over all ranks and micro-batches as gradients do.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BalancedRouter(TopKRouter):
    """TopKRouter that adds the loss where `documents` and `balance_weight` are set."""

    documents: Tensor | None = None
    """[2, t] int64 of the tokens of the forward pass under way: the document of each, -1 for padding; and how many documents there are,
    the same number everywhere."""
    balance_weight: float = 0.0
    """coefficient / documents of the step."""
    balance_loss: Tensor | float = 0.0
    """What this router's tokens have added to the step's loss since it was last set to 0."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [t, 1, experts] -> (probs [t, experts], routing map); a pass without gradients (to be recomputed) adds nothing."""
        probs, routing_map = super().routing(logits, padding_mask)
        if self.balance_weight and self.documents is not None and torch.is_grad_enabled():
            loss = self.balance_weight * balance_share(
                logits.flatten(0, -2), self.documents, self.topk, self.score_function, self.tp_cp_group
            )
            self.balance_loss += loss.detach().double()
            probs = _AddLoss.apply(probs, loss)
        return probs, routing_map


def balance_share(logits: Tensor, documents: Tensor, topk: int, score_function: str, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens' share of sum L over the documents of a micro-batch (collective over `group`, the ranks that share them)."""
    numbers, count = documents[0], int(documents[1, 0])
    real = numbers >= 0
    numbers, logits = numbers[real], logits[real].float()
    scores = torch.sigmoid(logits) if score_function == "sigmoid" else torch.softmax(logits, dim=-1)
    scores = scores / scores.sum(dim=-1, keepdim=True)
    with torch.no_grad():
        chosen = torch.zeros_like(scores).scatter_(1, scores.topk(topk, dim=-1).indices, 1.0)
        sums = scores.new_zeros(count, scores.shape[1] + 1)
        sums.index_add_(0, numbers, torch.cat([chosen, torch.ones_like(chosen[:, :1])], dim=1))
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        lengths = sums[:, -1:].clamp(min=1)
        frequency = sums[:, :-1] * (scores.shape[1] / topk) / lengths
    return (scores * (frequency / lengths)[numbers]).sum()


class _AddLoss(torch.autograd.Function):
    """The identity on x; `loss` takes part in the backward pass as a summand of the final loss."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.like
