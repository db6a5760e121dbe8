"""AdamW with the state layout of TransformerEngine's and apex's FusedAdam, on torch's fused update: one pass over the states.

torch.optim.AdamW keeps `step` per parameter; Megatron's distributed-optimizer checkpoints expect it in the parameter group.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled (`adam_w_mode`) or L2 weight decay; state per parameter: exp_avg, exp_avg_sq; `step` in the group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every parameter that has a gradient (source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            grads = [p.grad for p in params]
            first = [self.state[p]["exp_avg"] for p in params]
            second = [self.state[p]["exp_avg_sq"] for p in params]
            update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
            update(
                params,
                grads,
                first,
                second,
                [],
                [torch.tensor(float(step), device=params[0].device)] * len(params),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def install() -> None:
    """Make it Megatron's Adam where neither TransformerEngine nor apex provides one."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not distributed.HAVE_APEX_OR_TE:
        optimizer.Adam = distributed.Adam = FusedAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed.HAVE_APEX_OR_TE = True
