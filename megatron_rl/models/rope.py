"""Rotary position parameters of an HF config, in both spellings: `rope_theta` + `rope_scaling` (transformers 4), `rope_parameters` (5)."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.models.family import HFConfig

if TYPE_CHECKING:
    from torch import Tensor

_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN_FIELDS = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, keeps short ones, interpolates in between (Llama 3 herd of models, arXiv:2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, theta: float, rotary_dim: int) -> "Tensor":
        """[rotary_dim / 2] float32."""
        import torch

        plain = 1.0 / _powers(theta, rotary_dim)
        wavelengths = 2 * math.pi / plain
        longest = self.original_max_position_embeddings / self.low_freq_factor
        shortest = self.original_max_position_embeddings / self.high_freq_factor
        stretched = torch.where(wavelengths > longest, plain / self.factor, plain)
        weight = (self.original_max_position_embeddings / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - weight) * stretched / self.factor + weight * stretched
        between = ~(wavelengths < shortest) & ~(wavelengths > longest)
        return torch.where(between, blended, stretched)


@dataclass(frozen=True)
class YarnScaling:
    """Stretches by `factor` what turns less than `beta_slow` times within the original context, keeps what turns more than `beta_fast`
    times, with a linear ramp in between (YaRN, arXiv:2309.00071). Attention logits grow by (0.1 mscale_all_dim ln factor + 1)^2; the
    rotated values keep their length, since only mscale = mscale_all_dim is taken."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale_all_dim: float

    def frequencies(self, theta: float, rotary_dim: int) -> "Tensor":
        """[rotary_dim / 2] float32."""
        import torch

        powers = _powers(theta, rotary_dim)
        low, high = (
            rotary_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), rotary_dim - 1)
        ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept


@dataclass(frozen=True)
class Rope:
    """Rotary embedding; `theta` is the base of the wavelengths."""

    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None

    def inverse_frequencies(self, rotary_dim: int) -> "Tensor":
        """[rotary_dim / 2] float32, computed in the order of transformers' modeling_rope_utils, so that the bits agree."""
        return self.scaling.frequencies(self.theta, rotary_dim) if self.scaling else 1.0 / _powers(self.theta, rotary_dim)


def _powers(theta: float, rotary_dim: int) -> "Tensor":
    """theta^(2 i / rotary_dim), the inverses of the unscaled frequencies."""
    import torch

    return theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def check(hf: HFConfig, kinds: tuple[str, ...]) -> list[str]:
    """Rotary parameters that a family of these kinds does not compute, one line each."""
    parameters = _parameters(hf)
    if problems := [
        f"config.json: {field} = {hf[field]!r} is no table"
        for field in ("rope_scaling", "rope_parameters")
        if not isinstance(hf.get(field) or {}, dict)
    ]:
        return problems
    theta = parameters.get("rope_theta") or hf.get("rope_theta") or 10000.0
    if type(theta) not in (int, float) or theta <= 0:
        return [f"config.json: rope_theta = {theta!r} is no number above 0"]
    kind = _kind(parameters)
    if kind not in kinds:
        return [f"config.json: rope type {kind!r} is not supported, only {', '.join(map(repr, kinds))}"]
    needed = {"llama3": _LLAMA3_FIELDS, "yarn": _YARN_FIELDS}.get(kind, ())
    problems = [f"config.json: rope type {kind!r} needs {field!r}" for field in needed if parameters.get(field) is None]
    if kind == "yarn" and not problems:
        if not parameters["mscale"] == parameters["mscale_all_dim"] != 0 or parameters.get("attention_factor") not in (None, 1.0):
            problems.append("config.json: rope type 'yarn' is supported only with mscale = mscale_all_dim and no attention_factor")
        if not parameters.get("truncate", True):
            problems.append("config.json: rope type 'yarn' with truncate = false is not supported")
    return problems


def partial_rotary_factor(hf: HFConfig) -> float | None:
    """The share of a head that is turned, where the config says."""
    return _parameters(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor"))


def rope(hf: HFConfig) -> Rope:
    """Of a config that passed `check`."""
    parameters = _parameters(hf)
    theta = float(parameters.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    if _kind(parameters) == "default":
        return Rope(theta)
    if _kind(parameters) == "llama3":
        return Rope(theta, Llama3Scaling(**{field: parameters[field] for field in _LLAMA3_FIELDS}))
    factor, context = parameters["factor"], parameters["original_max_position_embeddings"]
    betas = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    return Rope(theta, YarnScaling(factor, context, *betas, parameters["mscale_all_dim"]))


def _parameters(hf: HFConfig) -> HFConfig:
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters")
    return parameters if isinstance(parameters, dict) else {}


def _kind(parameters: HFConfig) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"
