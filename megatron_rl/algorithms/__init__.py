"""Losses and advantages: pure functions, one small file each, built by name."""

from megatron_rl.algorithms.advantages import build_advantage
from megatron_rl.algorithms.losses import build_loss

__all__ = ["build_advantage", "build_loss"]
