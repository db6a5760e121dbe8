"""What runs in the process of tests/te/test_te_precision.py: what TransformerEngine and Megatron say of our recipes."""

from pathlib import Path

import te_extension
from pretend_gpu import CAPABILITY, pretend_gpu
from te_models import rank_of, write

from megatron_rl import models, platform
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.trainer import ParallelConfig, TrainerConfig

RECIPES = ("delayed", "current", "blockwise", "mxfp8", "nvfp4")


def main(args: list[str]) -> dict:
    """args: folder for the models."""
    directories = write(Path(args[0]))
    platform.install()
    te_extension.install()
    with rank_of(ParallelConfig()):
        return {
            "transformer_engine": {gpu: {recipe: _engine_accepts(gpu, recipe) for recipe in RECIPES} for gpu in CAPABILITY},
            "megatron": {gpu: {recipe: _megatron_accepts(directories["qwen3"], gpu, recipe) for recipe in RECIPES} for gpu in CAPABILITY},
            "alignment": _alignment(),
            "bf16 entries": _bf16_entries(directories["qwen3"]),
            "quantised": {name: _quantised(directory) for name, directory in directories.items()},
        }


def _build(directory: Path, precision: PrecisionConfig):
    return models.build(directory, TrainerConfig(), "bfloat16", precision)


def _engine_accepts(gpu: str, recipe: str) -> bool:
    from transformer_engine.pytorch import quantization as te

    checks = {"blockwise": te.check_fp8_block_scaling_support, "mxfp8": te.check_mxfp8_support, "nvfp4": te.check_nvfp4_support}
    with pretend_gpu(gpu, meta=True):
        return checks.get(recipe, te.check_fp8_support)()[0]


def _megatron_accepts(directory: Path, gpu: str, recipe: str) -> bool:
    """Whether the first forward pass gets into the recipe's context; the model is built on any GPU."""
    from megatron.core.fp4_utils import get_fp4_context
    from megatron.core.fp8_utils import get_fp8_context

    with pretend_gpu(gpu, meta=True):
        config = _build(directory, PrecisionConfig(recipe=recipe)).config
        try:
            with get_fp4_context(config) if config.fp4 else get_fp8_context(config):
                return True
        except (RuntimeError, AssertionError):
            return False


def _alignment() -> dict[str, int]:
    from megatron.core.enums import Fp4Recipe, Fp8Recipe
    from megatron.core.fp4_utils import get_fp4_align_size
    from megatron.core.fp8_utils import get_fp8_align_size

    names = {"delayed": "delayed", "current": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}
    return {ours: get_fp8_align_size(Fp8Recipe(name)) for ours, name in names.items()} | {"nvfp4": get_fp4_align_size(Fp4Recipe.nvfp4)}


def _bf16_entries(directory: Path) -> list[int]:
    """Entries of the stack that Megatron leaves in bfloat16 with one block at the bottom and two at the top."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    with pretend_gpu("H100", meta=True):
        config = _build(directory, PrecisionConfig(recipe="blockwise", first_layers_bf16=1, last_layers_bf16=2)).config
    return [entry for entry in range(config.num_layers) if is_first_last_bf16_layer(config, entry)]


def _quantised(directory: Path) -> list[str]:
    """Canonical names of the matrices that TransformerEngine multiplies by, which is what a recipe quantises."""
    import transformer_engine.pytorch as te

    from megatron_rl.conversion.live import live_tensors

    with pretend_gpu("H100", meta=True):
        policy = _build(directory, PrecisionConfig(recipe="blockwise"))
    (chunk,) = policy.chunks
    names = {id(tensor): name for name, tensor in live_tensors(policy, chunk).items()}
    linears = [module for module in chunk.modules() if isinstance(module, te.Linear | te.LayerNormLinear | te.GroupedLinear)]
    return sorted({names[id(p)] for module in linears for p in module.parameters(recurse=False) if p.dim() == 2})
