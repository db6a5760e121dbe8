"""The device of this process and what follows from it."""

import os
from importlib.util import find_spec
from typing import Any, Literal

import torch


def install() -> None:
    """Let Megatron-Core run on this machine. Call once per process, before megatron.core is imported; does nothing on CUDA."""
    if device().type == "cpu":
        from megatron_rl.platform import cpu

        cpu.install()


def device() -> torch.device:
    """Where this process computes: the GPU of LOCAL_RANK, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def communication_backend() -> str:
    """torch.distributed backend for this device."""
    return "nccl" if device().type == "cuda" else "gloo"


def layer_backend() -> Literal["torch", "transformer_engine"]:
    """Who implements norms, linears and attention: TransformerEngine where it is installed and there is a GPU, plain torch otherwise."""
    return "transformer_engine" if device().type == "cuda" and find_spec("transformer_engine") else "torch"


def transformer_defaults() -> dict[str, Any]:
    """TransformerConfig fields that depend on the device and on the installed extensions."""
    return {
        "use_cpu_initialization": device().type == "cpu",
        "persist_layer_norm": layer_backend() == "transformer_engine",
        # Megatron's name for "the layer provider brings the activation": ours does, TransformerEngine's path fuses it with the bias.
        "use_te_activation_func": layer_backend() == "torch",
        "moe_grouped_gemm": layer_backend() == "transformer_engine",
        "bias_activation_fusion": layer_backend() == "transformer_engine",
        "gradient_accumulation_fusion": device().type == "cuda" and find_spec("fused_weight_gradient_mlp_cuda") is not None,
    }


def matmul_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b [k, n] with float32 accumulation and float32 result, whatever the (common) type of the operands."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def host_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a copy of `tensor`, pinned where it comes from a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def optimizer_offload() -> dict[str, Any]:
    """OptimizerConfig fields that keep the optimizer's states in host memory and step there: none on a CPU, where that is so anyway
    (and Megatron's hybrid optimizer, which pairs GPU parameters with copies, does not run)."""
    fields = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
    return {} if device().type == "cpu" else fields
