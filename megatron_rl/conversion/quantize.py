"""8-bit and 4-bit weights through nvidia-modelopt's own tensor classes, row by row, in the form that vLLM loads.

A linear's weight becomes (n output features, k input features, e4m3 = torch.float8_e4m3fn):
    fp8             weight e4m3 [n, k], weight_scale float32 []
    fp8_blockwise   weight e4m3 [n, k], weight_scale_inv float32 [ceil(n/128), k/128]: one scale per 128 x 128 block
    nvfp4           weight uint8 [n, k/2] (two e2m1 in a byte, the even column in the low bits), weight_scale e4m3 [n, k/16],
                    weight_scale_2 float32 []
    mxfp8           weight e4m3 [n, k], weight_scale uint8 [n, k/32]: the exponent of a power of two, plus 127
A weight is its value times its scales. Bytes and scales are those of modelopt's export_hf_checkpoint for FP8_DEFAULT_CFG,
FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG (there: weight_scale, with two more dimensions of 1), W4A16_NVFP4_CFG and MXFP8_DEFAULT_CFG.

Nothing is calibrated, so no scale of an activation is written: vLLM takes it from the activations themselves (fp8, fp8_blockwise, mxfp8) or
leaves them in bfloat16 (nvfp4). For fp8 and fp8_blockwise config.json therefore says quant_method "fp8", as DeepSeek's and Qwen's own
checkpoints do: vLLM 0.32 reads modelopt's FP8 with stored activation scales only, and its FP8_PB_WO only without experts.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.checkpoint_layout import Row
from megatron_rl.conversion.hf_io import TensorSpec
from megatron_rl.conversion.megatron_model import MegatronModel
from megatron_rl.models.family import HFTensor
from megatron_rl.precision.ignore import is_ignored

RecipeName = Literal["fp8", "fp8_blockwise", "nvfp4", "mxfp8"]
E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
BLOCK = {"fp8": 1, "fp8_blockwise": 128, "nvfp4": 16, "mxfp8": 32}
"""Neighbouring columns that share a scale; it divides the columns."""
SCALE = {"fp8": "weight_scale", "fp8_blockwise": "weight_scale_inv", "nvfp4": "weight_scale", "mxfp8": "weight_scale"}
_MODELOPT_ALGORITHM = {"nvfp4": "W4A16_NVFP4", "mxfp8": "MXFP8"}
_SHARED_INPUT = ("q_a_proj", "kv_a_proj_with_mqa")
"""Rows that engines compute as one matrix, beside those that the family's table joins."""
_TINY = 1e-30
"""In place of the largest magnitude where all are zero: every scale is positive."""


@dataclass(frozen=True)
class Quantized:
    """The tensors of a Megatron checkpoint as a quantised HF directory has them.

    Raises:
        ConfigError: a weight that the recipe's blocks do not divide; while reading, one that is not finite.
    """

    model: MegatronModel
    recipe: RecipeName

    def __post_init__(self) -> None:
        for row in self.model.rows:
            for part, tensor in enumerate(row.rule.hf):
                if is_quantized(tensor):
                    self._check(tensor.name, row.whole.shape(tensor), last=part == len(row.rule.hf) - 1)

    def _check(self, name: str, shape: tuple[int, ...], last: bool) -> None:
        block = BLOCK[self.recipe]
        if shape[1] % block:
            raise ConfigError(f"tensor {name} {list(shape)}: {self.recipe} needs columns in blocks of {block}; choose another recipe")
        if self.recipe == "fp8_blockwise" and not last and shape[0] % block:
            raise ConfigError(
                f"tensor {name} {list(shape)}: engines stack it on the next one, so {self.recipe} needs rows in blocks of {block}; "
                "choose another recipe"
            )

    def specs(self, row: Row) -> list[TensorSpec]:
        """Of `tensors`."""
        specs = []
        for tensor, spec in zip(row.hf_tensors(self.model.tied_head), self.model.specs(row), strict=True):
            specs += self._layout(spec) if is_quantized(tensor) else [spec]
        return specs

    def tensors(self, row: Row) -> Iterator[tuple[str, Tensor]]:
        """The row's tensors, each weight followed by its scales."""
        parts = list(self.model.tensors(row))
        shared = None
        if is_quantized(parts[0][0]) and (self.recipe == "nvfp4" or (self.recipe == "fp8" and row.expert is not None)):
            shared = torch.stack([_largest(tensor.name, value) for tensor, value in [*parts, *self._beside(row)]]).max()
        for tensor, value in parts:
            if not is_quantized(tensor):
                yield tensor.name, value
                continue
            for suffix, quantized in quantize(tensor.name, value, self.recipe, shared).items():
                yield _sibling(tensor.name, suffix), quantized

    def write_config(self, directory: Path) -> None:
        """Add quantization_config to config.json; write modelopt's hf_quant_config.json where the recipe's form is modelopt's."""
        section, beside = self._config()
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}, indent=2) + "\n")
        if beside:
            (directory / "hf_quant_config.json").write_text(json.dumps(beside, indent=2) + "\n")

    def _config(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        kept = self._kept()
        if self.recipe not in _MODELOPT_ALGORITHM:
            blocks = {"weight_block_size": [128, 128]} if self.recipe == "fp8_blockwise" else {}
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **blocks, "modules_to_not_convert": kept}, None
        import modelopt
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

        quantization = {
            "quant_algo": _MODELOPT_ALGORITHM[self.recipe],
            "kv_cache_quant_algo": None,
            "group_size": BLOCK[self.recipe],
            "exclude_modules": kept,
        }
        full = {"producer": {"name": "modelopt", "version": modelopt.__version__}, "quantization": quantization}
        return convert_hf_quant_config_format(full), full

    def _kept(self) -> list[str]:
        """Modules with a matrix that is not quantised, tensors that are passed through among them. Every name in full: vLLM's readers
        agree on that alone."""
        names = [spec.name for row in self.model.rows for spec in self.specs(row) if len(spec.shape) == 2 and spec.dtype in _FLOATS]
        names += ["lm_head.weight", *(name for portion in self.model.passthrough for name in portion.names)]
        return sorted({name.removesuffix(".weight") for name in names if name.endswith(".weight") and "embed_tokens" not in name})

    def _layout(self, spec: TensorSpec) -> list[TensorSpec]:
        rows, columns = spec.shape
        scale = {
            "fp8": ((), torch.float32),
            "fp8_blockwise": ((-(-rows // 128), columns // 128), torch.float32),
            "nvfp4": ((rows, columns // 16), E4M3),
            "mxfp8": ((rows, columns // 32), torch.uint8),
        }[self.recipe]
        packed = self.recipe == "nvfp4"
        weight = TensorSpec(spec.name, (rows, columns // 2), torch.uint8) if packed else TensorSpec(spec.name, spec.shape, E4M3)
        specs = [weight, TensorSpec(_sibling(spec.name, SCALE[self.recipe]), *scale)]
        return [*specs, TensorSpec(_sibling(spec.name, "weight_scale_2"), (), torch.float32)] if packed else specs

    def _beside(self, row: Row) -> Iterator[tuple[HFTensor, Tensor]]:
        """Tensors of other rows that an engine stacks on this one's."""
        block, _, module = row.rule.hf[0].name.removesuffix(".weight").rpartition(".")
        if module in _SHARED_INPUT:
            names = {f"{block}.{other}.weight" for other in _SHARED_INPUT if other != module}
            for other in self.model.rows:
                if other.rule.hf[0].name in names:
                    yield from self.model.tensors(other)


_FLOATS = (torch.float32, torch.bfloat16)


def is_quantized(tensor: HFTensor) -> bool:
    """Whether this tensor of the family's table is the weight of a linear that recipes quantise."""
    return len(tensor.dims) == 2 and tensor.name.endswith(".weight") and not is_ignored(tensor.name)


def quantize(name: str, weight: Tensor, recipe: RecipeName, shared: Tensor | None = None) -> dict[str, Tensor]:
    """`weight` [n, k] and its scales by the last part of their names. shared: the largest magnitude of the weights that an engine computes
    as one matrix and that therefore have one scale for all (nvfp4's weight_scale_2, fp8's of an expert's gate and up); by default the
    weight's own.

    Raises:
        ConfigError: the weight is not finite.
    """
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    own = _largest(name, weight)
    largest = own if shared is None else shared
    if recipe == "fp8":
        scale = largest / E4M3_MAX
        return {"weight": FP8QTensor.quantize(weight, scale)[0]._quantized_data, "weight_scale": scale}
    if recipe == "fp8_blockwise":
        blocks = {-1: 128, -2: 128}
        scale = _block_largest(weight) / E4M3_MAX
        return {"weight": FP8QTensor.quantize(weight, scale, block_sizes=blocks)[0]._quantized_data, "weight_scale_inv": scale}
    if recipe == "nvfp4":
        global_scale = largest / (6.0 * E4M3_MAX)
        scale, _ = NVFP4QTensor.get_weights_scaling_factor(weight, 16, global_scale)
        packed = NVFP4QTensor.quantize(weight, 16, scale, global_scale)[0]._quantized_data
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": global_scale}
    scale = MXFP8QTensor.get_weights_scaling_factor(weight)
    return {"weight": MXFP8QTensor.quantize_with_scale(weight, scale), "weight_scale": scale}


def dequantize(tensors: dict[str, Tensor], recipe: RecipeName) -> tuple[Tensor, Tensor]:
    """(values, how far each may lie from the weight it stands for), float32 [n, k], of what `quantize` returns.

    e4m3 rounds to 2^-4 of a value or to 2^-10 of its scale; modelopt divides by fp8's one scale in the weight's own type, which adds
    bfloat16's 2^-9. The widest gap of e2m1 is 4 to 6: one scale; an e4m3 block scale is too small by 2^-10 at most where it is subnormal,
    which leaves 6 * 2^-10 above the largest value.
    """
    weight, scale = tensors["weight"], tensors[SCALE[recipe]].float()
    if recipe == "nvfp4":
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()
        values = magnitudes[codes & 7] * (1 - (codes >> 3) * 2)
        scale, global_scale = scale.repeat_interleave(16, -1), tensors["weight_scale_2"]
        return values * scale * global_scale, (scale * 1.001 + 6 * 2**-10) * global_scale
    if recipe == "mxfp8":
        scale = torch.exp2(scale - 127).repeat_interleave(32, -1)
    elif recipe == "fp8_blockwise":
        scale = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
    values = weight.float() * scale
    return values, values.abs() * (2**-4 + 2**-8) * (1 + 2**-3) + scale * 2**-10


def _largest(name: str, weight: Tensor) -> Tensor:
    largest = torch.linalg.vector_norm(weight, float("inf")).float()
    if not largest.isfinite():
        raise ConfigError(f"tensor {name} holds NaN or infinity; a quantised copy of it would be worthless")
    return largest.clamp(min=_TINY)


def _block_largest(weight: Tensor) -> Tensor:
    """[ceil(n/128), k/128] of [n, k], float32."""
    rows = [band.unflatten(1, (-1, 128)).abs().amax((0, 2)) for band in weight.split(128)]
    return torch.stack(rows).float().clamp(min=_TINY)


def _sibling(weight_name: str, suffix: str) -> str:
    return f"{weight_name.removesuffix('weight')}{suffix}"
