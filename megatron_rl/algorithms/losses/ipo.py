"""IPO: importance-weighted policy gradient inside a two-sided trust region on probabilities; no KL term.

With p = exp(trainer_logprobs), q = exp(inference_logprobs), r = p / q:
    loss_t = -A_t min(r_t, cap)    where |p_t - q_t| <= eps, else 0
Source: prime-rl 0.10 (its default loss, eps 0.3). The mask is a comparison of values: no gradient flows through it.
"""

import math

import torch

from megatron_rl.algorithms.losses.ratio import capped_ratio, probability_gap


def build(eps: float = 0.3, max_ratio: float = 1e4) -> "IPO":
    if not eps > 0:
        raise ValueError(f"loss 'ipo': eps = {eps}; it must be positive")
    return IPO(eps, max_ratio)


class IPO:
    granularity = "token"

    def __init__(self, eps: float, max_ratio: float) -> None:
        self.eps, self.log_cap = eps, math.log(max_ratio)

    def __call__(
        self,
        trainer_logprobs: torch.Tensor,
        inference_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = mask.bool()
        keep = mask & (probability_gap(trainer_logprobs.detach(), inference_logprobs) <= self.eps)
        # select before exp: a dropped token with a huge log ratio must contribute exactly 0, never 0 * inf
        log_ratio = torch.where(keep, trainer_logprobs - inference_logprobs, 0.0)
        loss = torch.where(keep, -advantages * capped_ratio(log_ratio, self.log_cap), 0.0)
        return loss, {"is_masked": (mask & ~keep).float()}
