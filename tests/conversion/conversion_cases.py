"""What runs on the rank of tests/conversion/test_live.py."""

from pathlib import Path

import torch

from megatron_rl import conversion, models, platform
from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig, TrainerConfig


def main(args: list[str]) -> dict:
    """args: a good directory, its bfloat16 twin, then broken ones; saves the good one twice to <good>.saved."""
    good, twin, *broken = args
    platform.install()
    world = platform.initialize(ParallelConfig(), seed=0, timeout_s=60, threads=1)
    policy = models.build(good, TrainerConfig(), "float32")
    errors = {}
    for directory in broken:
        try:
            conversion.load_hf(policy, directory)
        except ConfigError as error:
            errors[Path(directory).name] = str(error)
    conversion.load_hf(policy, twin)
    widened = {name: [str(tensor.dtype), tensor.double().sum().item()] for name, tensor in conversion.export_tensors(policy)}
    conversion.load_hf(policy, good)
    saved = Path(good + ".saved")
    conversion.save_hf(policy, saved, twin)
    (saved / "stale").touch()
    with torch.no_grad():
        policy.chunks[0].decoder.final_norm.weight.zero_()
    conversion.save_hf(policy, saved, good)
    world.shutdown()
    return {"errors": errors, "widened": widened}
