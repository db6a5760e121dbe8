"""Runs in the process of test_presets.py: builds every preset whole, on one rank, without storage."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from megatron_rl import models, platform
from megatron_rl.config.trainer import ParallelConfig, TrainerConfig


class Meta(TorchFunctionMode):
    """New tensors are shapes without storage, and stay that (drawing random shapes would take most of the time)."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            kwargs["device"] = "meta"
        if func is torch.nn.init.normal_:
            return kwargs["tensor"]
        return args[0] if func.__name__ == "to" else func(*args, **kwargs)


def main(args: list[str]) -> dict[str, dict[str, list[int]]]:
    """Shapes of what a checkpoint holds, by preset and canonical name."""
    platform.install()
    world = platform.initialize(ParallelConfig(), seed=0, timeout_s=60, threads=1)
    shapes = {name: _shapes(config) for name, config in models.presets().items()}
    world.shutdown()
    return shapes


def _shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    from megatron_rl.conversion.live import live_tensors

    with tempfile.TemporaryDirectory() as folder, Meta():
        (Path(folder) / "config.json").write_text(json.dumps(config))
        policy = models.build(folder, TrainerConfig(), "bfloat16")
        tensors = live_tensors(policy, policy.chunks[0])
    assert all(tensor.is_meta for tensor in tensors.values())
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
