"""What SFT and RL share: ranks, policy, optimizer, and the last words of a run."""

from dataclasses import dataclass
from pathlib import Path

from megatron_rl import conversion, models
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.trainer import OptimConfig, SchedulerConfig, TrainerConfig
from megatron_rl.models.policy import Policy
from megatron_rl.platform import World
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.optimizer import Optimizer


@dataclass
class Session:
    """One trainer rank, ready to train from `start` (the number of steps already made)."""

    world: World
    policy: Policy
    optimizer: Optimizer
    source: str
    start: int

    def save_hf(self, out: Path) -> None:
        """The policy as an HF directory (collective)."""
        conversion.save_hf(self.policy, out, self.source)


def open_session(
    world: World,
    model: ModelConfig,
    source: str,
    trainer: TrainerConfig,
    optim: OptimConfig,
    scheduler: SchedulerConfig,
    steps: int,
    resume_from: Path | None,
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
) -> Session:
    """Build this rank's part of the policy, and load `source`'s weights (HF) or the checkpoint `resume_from`."""
    policy = models.build(source, trainer, model.dtype, precision)
    if resume_from is None:
        conversion.load_hf(policy, source)
    optimizer = Optimizer(policy, optim, scheduler, steps, trainer.offload_optimizer)
    start = checkpoint.load(resume_from, optimizer) if resume_from else 0
    return Session(world, policy, optimizer, source, start)
