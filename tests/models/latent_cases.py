"""What runs on the rank of tests/models/test_latent_attention.py."""

from pathlib import Path

from megatron_rl import conversion, models, platform
from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig, TrainerConfig


def main(args: list[str]) -> dict:
    """args: a GLM-5 with a block for multi-token prediction, the same without the config's word of it; saves the first as <name>.saved."""
    good, unannounced = args
    platform.install()
    world = platform.initialize(ParallelConfig(), seed=0, timeout_s=60, threads=1)
    policy = models.build(good, TrainerConfig(), "float32")
    conversion.load_hf(policy, good)
    conversion.save_hf(policy, Path(good + ".saved"), good)
    frozen = sorted(name for name, parameter in policy.chunks[0].named_parameters() if not parameter.requires_grad)
    error = None
    try:
        conversion.load_hf(models.build(unannounced, TrainerConfig(), "float32"), unannounced)
    except ConfigError as refusal:
        error = str(refusal)
    world.shutdown()
    return {"frozen": frozen, "error": error}
