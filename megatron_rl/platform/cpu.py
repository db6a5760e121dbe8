"""Megatron-Core 0.19.2 without a GPU: the torch.cuda surface that a training step touches, answered by the CPU.

Nothing inside megatron.core is edited. Process-wide, so it is for trainer ranks only. What is patched, and who needs it:
  placement     torch.cuda.current_device(), device="cuda" in factories, .cuda(), pin_memory   (schedules, optimizer, mappings, RoPE)
  random state  the "cuda" generator is the CPU's                                            (tensor_parallel.random, recompute)
  streams       no-op stream, event, synchronize, memory counters                             (DDP, pipeline p2p, checkpoints)
  Tensor.type   "torch.cuda.FloatTensor" for a float tensor                                   (optimizer and gradient clipping sort by it)
"""

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like")
# About GPU extensions that no CPU can have (`megatron-rl doctor` lists them) and about a default of Megatron's own.
_EXPECTED_WARNINGS = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"absl\.logging is not installed",
    r"full scope is deprecated",
)


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Generators:
    """torch.cuda.default_generators: one device, whose generator is the CPU's."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


def _is_cuda(target: Any) -> bool:
    return (isinstance(target, str) and target.startswith("cuda")) or (isinstance(target, torch.device) and target.type == "cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


@functools.cache
def install() -> None:
    """Patch this process; the second call does nothing."""
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # Each rank would compile a C++ kernel for every tiny fusion.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    _patch_placement()
    _patch_random_state()
    _patch_streams()
    _patch_tensor_type()


def _patch_placement() -> None:
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.set_device = lambda _: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    # `with torch.device(...)` recognises factories by identity: let it remember the originals, which the wrappers call.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _patch_random_state() -> None:
    cuda = torch.cuda
    cuda.default_generators = _Generators()
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda fn, **_: fn()
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed) and None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    # The tracker warns when the CPU generator moves inside a "GPU" fork; here that is the point.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_streams() -> None:
    cuda = torch.cuda
    stream = _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None


def _patch_tensor_type() -> None:
    type_of = torch.Tensor.type

    def type_with_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_with_device
