"""Model families on Megatron's HybridModel: `check_supported` and `presets` (no torch), and `build`."""

from typing import TYPE_CHECKING, Literal

from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.models.registry import check_supported, family_of, presets, read_hf_config

if TYPE_CHECKING:
    from megatron_rl.models.policy import Policy

__all__ = ["build", "check_supported", "family_of", "presets", "read_hf_config"]


def build(
    hf_dir: str,
    trainer: TrainerConfig,
    dtype: Literal["float32", "bfloat16"],
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
) -> "Policy":
    """This rank's part of the model that `hf_dir`/config.json describes, with fresh weights; `conversion.load_hf` fills them.

    Of `trainer` it reads what concerns the model: layout, experts, recomputation, offloading, the head. `platform.initialize` must have
    built the process groups.

    Raises:
        ConfigError: the model or the layout is not supported.
    """
    from megatron_rl.models.policy import build_policy

    return build_policy(read_hf_config(hf_dir), trainer, dtype, precision)
