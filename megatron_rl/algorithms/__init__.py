"""Losses and advantages: pure functions, one small file each, built by name.

`build_loss` is in losses/ (torch), `build_advantage` in advantages/ (plain Python: the orchestrator runs without torch).
"""

from typing import TYPE_CHECKING, Any

from megatron_rl.algorithms.advantages import build_advantage

if TYPE_CHECKING:
    from megatron_rl.algorithms.losses import build_loss

__all__ = ["build_advantage", "build_loss"]


def __getattr__(name: str) -> Any:
    """Import torch with the losses, not with the advantages."""
    if name == "build_loss":
        from megatron_rl.algorithms.losses import build_loss

        return build_loss
    raise AttributeError(name)
