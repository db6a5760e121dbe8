"""Activations kept for the backward pass lie in host memory, through autograd's hooks on saved tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_rl import platform

SMALLEST = 1024
"""Elements; what is smaller stays where it is."""


@contextmanager
def offloaded_activations() -> Iterator[None]:
    """What a forward pass inside saves is copied to the host (pinned, where there is a GPU) and comes back when its backward needs it.
    Parameters stay."""
    with torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device):
        yield


def _to_host(tensor: Tensor) -> Tensor | tuple[Tensor, torch.device]:
    if (tensor.is_leaf and tensor.requires_grad) or tensor.numel() < SMALLEST:
        return tensor
    host = platform.host_buffer(tensor)
    return host.copy_(tensor, non_blocking=True), tensor.device


def _to_device(saved: Tensor | tuple[Tensor, torch.device]) -> Tensor:
    # Copies in both directions follow one another on the stream, so none is read before it has come.
    return saved if isinstance(saved, Tensor) else saved[0].to(saved[1], non_blocking=True)
