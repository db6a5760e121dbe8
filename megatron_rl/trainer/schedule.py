"""Learning rate over the steps of a run."""

import math

from megatron_rl.config.trainer import SchedulerConfig


def learning_rate(step: int, peak: float, scheduler: SchedulerConfig, steps: int) -> float:
    """Learning rate of step 1..steps: linear from peak / warmup to peak, then constant, or down to peak * min_ratio at `steps`."""
    if step <= scheduler.warmup_steps:
        return peak * step / scheduler.warmup_steps
    if scheduler.kind == "constant":
        return peak
    progress = (step - scheduler.warmup_steps) / (steps - scheduler.warmup_steps)
    shape = 1 - progress if scheduler.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (scheduler.min_ratio + (1 - scheduler.min_ratio) * shape)
