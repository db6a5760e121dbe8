"""Megatron-Core 0.19.2 without a GPU: the torch.cuda surface that a training step touches, answered by the CPU.

Nothing inside megatron.core is edited. Process-wide, so it is for trainer ranks only. What is patched, and who needs it:
  placement     torch.cuda.current_device(), device="cuda" in factories, .cuda(), pin_memory   (schedules, optimizer, mappings, RoPE)
  random state  the "cuda" generator is the CPU's                                            (tensor_parallel.random, recompute)
  streams       no-op stream, event, synchronize, memory counters                             (DDP, pipeline p2p, checkpoints)
  Tensor.type   "torch.cuda.FloatTensor" for a float tensor                                   (optimizer and gradient clipping sort by it)
  collectives   all-to-all split sizes as numbers, which Megatron leaves as tensors unless they are CUDA's; gather and reduce-scatter of
                shares that differ in length, which NCCL takes and gloo does not                 (MoE token dispatch); nothing is
                copied within a group of one, where gloo copies a model's gradients and weights   (distributed optimizer)
"""

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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


class _Done:
    """Of a collective that had nothing to do."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
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
    _patch_collectives()


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


def _patch_collectives() -> None:
    all_to_all_single, all_gather, reduce_scatter = dist.all_to_all_single, dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_to_all_single)
    def all_to_all_with_numbers(
        output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        sizes = (s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes))
        return all_to_all_single(output, input, *sizes, *args, **kwargs)

    @functools.wraps(all_gather)
    def uneven_all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (longest := _longest(tensor_list)) is None:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        gathered = [_padded(share, longest) for share in tensor_list]
        all_gather(gathered, _padded(tensor, longest), *args, **kwargs)
        for share, whole in zip(tensor_list, gathered, strict=True):
            share.copy_(whole[: len(share)])

    @functools.wraps(reduce_scatter)
    def uneven_reduce_scatter(output: torch.Tensor, input_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if (longest := _longest(input_list)) is None:
            return reduce_scatter(output, input_list, *args, **kwargs)
        reduced = _padded(output, longest)
        reduce_scatter(reduced, [_padded(share, longest) for share in input_list], *args, **kwargs)
        output.copy_(reduced[: len(output)])

    dist.all_to_all_single, dist.all_gather, dist.reduce_scatter = all_to_all_with_numbers, uneven_all_gather, uneven_reduce_scatter
    dist.reduce_scatter_tensor = _free_within_one(dist.reduce_scatter_tensor)
    dist.all_gather_into_tensor = _free_within_one(dist.all_gather_into_tensor)


def _free_within_one(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective (output, input, ..., group), which in a group of one only has to bring the input to the output."""

    @functools.wraps(collective)
    def wrapper(output: torch.Tensor, input: torch.Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if dist.get_world_size(group) > 1 or args:
            return collective(output, input, *args, group=group, async_op=async_op, **kwargs)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input.view_as(output))
        return _Done() if async_op else None

    return wrapper


def _longest(shares: list[torch.Tensor]) -> int | None:
    """Length of the longest share; None where they are all alike."""
    lengths = {share.shape[0] if share.ndim else 0 for share in shares}
    return max(lengths) if len(lengths) > 1 else None


def _padded(share: torch.Tensor, length: int) -> torch.Tensor:
    padded = share.new_zeros(length, *share.shape[1:])
    padded[: len(share)] = share
    return padded
