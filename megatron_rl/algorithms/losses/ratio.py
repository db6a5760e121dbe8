"""Importance ratios that stay finite, shared by the losses."""

import torch


def capped_ratio(log_ratio: torch.Tensor, log_cap: float) -> torch.Tensor:
    """exp(log_ratio), its value capped at exp(log_cap); above the cap the gradient is the cap's (straight through)."""
    value = log_ratio.detach().clamp(max=log_cap)
    return torch.exp(value + (log_ratio - log_ratio.detach()))


def probability_gap(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """|exp(logp) - exp(logq)| without cancellation: exp(max) * -expm1(min - max)."""
    high, low = torch.maximum(logp, logq), torch.minimum(logp, logq)
    return torch.exp(high) * -torch.expm1(low - high)


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """The k3 estimator of KL(q || p) from samples of q: r - log r - 1 >= 0 (Schulman, 2020)."""
    return torch.expm1(log_ratio) - log_ratio
