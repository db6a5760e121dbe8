"""Rotary position parameters of an HF config, in both spellings: `rope_theta` + `rope_scaling` (transformers 4), `rope_parameters` (5)."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.models.family import HFConfig

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("default", "llama3")
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, keeps short ones, interpolates in between (Llama 3 herd of models, arXiv:2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Rope:
    """Rotary embedding; `theta` is the base of the wavelengths."""

    theta: float
    scaling: Llama3Scaling | None = None

    def inverse_frequencies(self, rotary_dim: int) -> "Tensor":
        """[rotary_dim / 2] float32, computed in the order of transformers' modeling_rope_utils, so that the bits agree."""
        import torch

        plain = 1.0 / (self.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
        if self.scaling is None:
            return plain
        s = self.scaling
        wavelengths = 2 * math.pi / plain
        longest = s.original_max_position_embeddings / s.low_freq_factor
        shortest = s.original_max_position_embeddings / s.high_freq_factor
        stretched = torch.where(wavelengths > longest, plain / s.factor, plain)
        weight = (s.original_max_position_embeddings / wavelengths - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        blended = (1 - weight) * stretched / s.factor + weight * stretched
        between = ~(wavelengths < shortest) & ~(wavelengths > longest)
        return torch.where(between, blended, stretched)


def check(hf: HFConfig) -> list[str]:
    """Rotary parameters we do not compute, one line each."""
    parameters = _parameters(hf)
    kind = _kind(parameters)
    if kind not in _KINDS:
        return [f"config.json: rope type {kind!r} is not supported, only {', '.join(map(repr, _KINDS))}"]
    return [f"config.json: rope type 'llama3' needs {field!r}" for field in _LLAMA3_FIELDS if kind == "llama3" and field not in parameters]


def partial_rotary_factor(hf: HFConfig) -> float | None:
    """The share of a head that is turned, where the config says."""
    return _parameters(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor"))


def rope(hf: HFConfig) -> Rope:
    """Of a config that passed `check`."""
    parameters = _parameters(hf)
    theta = float(parameters.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    if _kind(parameters) == "default":
        return Rope(theta)
    return Rope(theta, Llama3Scaling(**{field: parameters[field] for field in _LLAMA3_FIELDS}))


def _parameters(hf: HFConfig) -> HFConfig:
    return hf.get("rope_parameters") or hf.get("rope_scaling") or {}


def _kind(parameters: HFConfig) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"
