"""Model families on Megatron's HybridModel: `check_supported` and `presets` (no torch), and `build`."""

from typing import TYPE_CHECKING, Literal

from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.trainer import MoEConfig, ParallelConfig, RecomputeModule
from megatron_rl.models.registry import check_supported, family_of, presets, read_hf_config

if TYPE_CHECKING:
    from megatron_rl.models.policy import Policy

__all__ = ["build", "check_supported", "family_of", "presets", "read_hf_config"]


def build(
    hf_dir: str,
    parallel: ParallelConfig,
    dtype: Literal["float32", "bfloat16"],
    recompute: Literal["none", "full", "selective"] = "none",
    head_chunk_tokens: int = 1024,
    moe: MoEConfig = MoEConfig(),  # noqa: B008 (frozen)
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
    recompute_modules: tuple[RecomputeModule, ...] = (),
    offload_activations: bool = False,
) -> "Policy":
    """This rank's part of the model that `hf_dir`/config.json describes, with fresh weights; `conversion.load_hf` fills them.

    `platform.initialize` must have built the process groups.

    Raises:
        ConfigError: the model or the layout is not supported.
    """
    from megatron_rl.models.policy import build_policy

    return build_policy(
        read_hf_config(hf_dir), parallel, moe, precision, dtype, recompute, recompute_modules, head_chunk_tokens, offload_activations
    )
