"""A machine without a GPU that answers as if it had one: TransformerEngine's and Megatron's Python code runs on the CPU or on meta.

The answers about memory, streams and random state are those of megatron_rl.platform.cpu; here are the ones about which GPU it is.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from megatron_rl.platform import cpu

CAPABILITY = {"A100": (8, 0), "L40S": (8, 9), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}


@contextlib.contextmanager
def pretend_gpu(name: str = "H100", meta: bool = False) -> Iterator[None]:
    """One GPU of CAPABILITY, which is the CPU, or meta. Call platform.install() before."""
    properties = mock.Mock(major=CAPABILITY[name][0], minor=CAPABILITY[name][1], multi_processor_count=132, total_memory=80 << 30)
    properties.name = f"NVIDIA {name}"
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": CAPABILITY[name],
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "is_current_stream_capturing": False,
    }
    plain_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = _stay(tensor, args, kwargs)
        return plain_to(tensor, *args, **kwargs)

    with contextlib.ExitStack() as patches:
        for function, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, function, lambda *_, answer=answer, **__: answer))
        patches.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        patches.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "cpu")))
        patches.enter_context(mock.patch.object(torch.Tensor, "to", to))
        patches.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda *_: None))
        patches.enter_context(mock.patch.object(cpu, "_is_cuda", _is_gpu))
        patches.enter_context(_Placement(meta))
        _forget_support()
        yield
    _forget_support()


class _Placement(TorchFunctionMode):
    """Device 0 is a device; with `meta`, every new tensor is a shape without storage. Off in backward passes."""

    def __init__(self, meta: bool) -> None:
        super().__init__()
        self.meta = meta

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device and _is_gpu(args[0]):
            return torch.device("cuda", 0)
        if self.meta and (func in _device_constructors() or func.__name__ in ("empty_like", "zeros_like", "ones_like")):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _stay(tensor: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments of Tensor.to with the tensor's own device in the place of the GPU."""
    here = tensor.device
    return tuple(here if _is_gpu(arg) else arg for arg in args), {key: here if _is_gpu(arg) else arg for key, arg in kwargs.items()}


def _is_gpu(value: Any) -> bool:
    return str(value).startswith("cuda") if isinstance(value, str | torch.device) else type(value) is int


def _forget_support() -> None:
    """TE asks the device once and keeps the answer."""
    from transformer_engine.pytorch import quantization, utils

    for module in (quantization, utils):
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    for flag in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        if not hasattr(quantization, flag):
            raise AttributeError(f"transformer_engine.pytorch.quantization.{flag} is gone: its support flags are kept elsewhere now")
        setattr(quantization, flag, None)
