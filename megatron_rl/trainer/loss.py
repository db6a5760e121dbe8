"""The objective: L = sum(rl) / N_rl + sum(ce) / N_ce, with the denominators of the whole step.

Each rank and micro-batch adds its tokens' share; gradients are summed (never averaged) over data and context parallel
ranks and micro-batches, so the result does not depend on how the step was cut up.
"""

import math

import torch

from megatron_rl.algorithms.losses import Loss
from megatron_rl.algorithms.losses.ratio import k3
from megatron_rl.trainer.batch import ModelInputs

SUMS = ("loss", "rl_weight", "ce_weight", "sampled", "entropy", "k3", "is_masked", "trained")
"""What is summed over the step's tokens beside the gradient."""
Stats = dict[str, torch.Tensor]


def objective(logprobs: torch.Tensor, entropy: torch.Tensor, inputs: ModelInputs, rl_loss: Loss) -> tuple[torch.Tensor, Stats]:
    """One micro-batch's contribution to L, and the sums (float64 scalars) behind the step's metrics.

    logprobs, entropy: float32 [t] of this rank's tokens. A micro-batch that trains nothing gives 0 with a graph, so
    that every rank runs its backward.
    """
    t = inputs.targets
    mask, rl_weights, ce_weights = t["loss_mask"].bool(), t["rl_weights"], t["ce_weights"]
    rl_mask = mask & (rl_weights != 0)
    per_token, metrics = rl_loss(logprobs, t["inference_logprobs"], t["advantages"], rl_mask)
    loss = 0.0 * logprobs.sum()
    if "rl" in inputs.denominators:
        loss = loss + (per_token * rl_weights).sum() / inputs.denominators["rl"]
    if "ce" in inputs.denominators:
        loss = loss - torch.where(ce_weights != 0, ce_weights * logprobs, 0.0).sum() / inputs.denominators["ce"]
    with torch.no_grad():
        difference = torch.where(rl_mask, logprobs - t["inference_logprobs"], 0.0)
        stats: Stats = {
            "loss": loss,
            "rl_weight": (rl_weights * mask).double().sum(),
            "ce_weight": ce_weights.double().sum(),
            "sampled": rl_mask.sum(),
            "trained": (rl_mask | (ce_weights != 0)).sum(),
            "entropy": torch.where(rl_mask | (ce_weights != 0), entropy, 0.0).sum(),
            "k3": torch.where(rl_mask, k3(difference), 0.0).sum(),
            "is_masked": metrics.get("is_masked", torch.zeros_like(logprobs)).sum(),
            "logprob_diff_max": difference.abs().max(),
        }
    return loss, {name: value.detach().double() for name, value in stats.items()}


def require_finite(value: float, what: str, step: int) -> None:
    """The gate before an update. Every rank holds the same value, so every rank stops here or none does."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"step {step}: {what} is {value}; the weights were not updated. "
            f"Lower trainer.optim.lr or resume from the last checkpoint; the batch is worth a look (dump_batches = true)."
        )
