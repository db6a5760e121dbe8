"""Policy losses by name. A new loss is one file with a factory `build(**options) -> Loss`, and one row here."""

from collections.abc import Callable

import torch

from megatron_rl.algorithms import factories
from megatron_rl.algorithms.losses import ipo

Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(trainer_logprobs, inference_logprobs, advantages, mask, cu_seqlens=None) -> (per-token loss, per-token metrics).

All tensors are 1-D float (mask: bool) of one length. The loss is 0 outside the mask and divided by nothing; metrics
are per-token values to be averaged over the mask. `granularity` on the function: "token" or "sequence".
"""

LOSSES: dict[str, Callable[..., Loss]] = {"ipo": ipo.build}


def build_loss(name: str, **options: float) -> Loss:
    """The loss `name` with its options. ValueError names an unknown loss or option and the known ones."""
    return factories.build("loss", LOSSES, name, options)
