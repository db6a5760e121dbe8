"""Megatron layer providers by the platform's backend name."""

from collections.abc import Callable

import torch
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.torch_norm import LayerNormBuilder

from megatron_rl import platform
from megatron_rl.kernels.swiglu.reference import swiglu
from megatron_rl.models.layers.attention import TorchAttention
from megatron_rl.models.layers.experts import TorchGroupedMLP
from megatron_rl.models.layers.moe_layer import BalancedMoELayer, TorchMoELayer
from megatron_rl.models.layers.norm import TorchRMSNorm
from megatron_rl.models.layers.replicated import ReplicatedLinear, TorchLayerNorm
from megatron_rl.models.layers.self_attention import TorchSelfAttention


class TorchProvider(LocalSpecProvider):
    """Megatron's plain linears with our norm, attention, SwiGLU and experts."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> LayerNormBuilder:
        return TorchRMSNorm if rms_norm else TorchLayerNorm

    def linear(self) -> type:
        return ReplicatedLinear

    def core_attention(self) -> type:
        return TorchAttention

    def activation_func(self) -> Callable[..., torch.nn.Module]:
        return SwiGLU

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> type[TorchGroupedMLP]:
        return TorchGroupedMLP


class SwiGLU(torch.nn.Module):
    """[..., 2 f] -> [..., f]; no weights."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_up)


def self_attention(layers: BackendSpecProvider) -> type[SelfAttention]:
    """The attention module that goes with a provider's layers."""
    return TorchSelfAttention if isinstance(layers, TorchProvider) else SelfAttention


def moe_layer(layers: BackendSpecProvider) -> type[BalancedMoELayer]:
    """The mixture-of-experts module that goes with a provider's layers."""
    return TorchMoELayer if isinstance(layers, TorchProvider) else BalancedMoELayer


def provider() -> BackendSpecProvider:
    """The layers of this platform."""
    if platform.layer_backend() == "torch":
        return TorchProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
