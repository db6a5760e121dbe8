"""The only place that knows cpu from cuda: device, process groups, layer backend, stack report.

Entry points call `install()` before anything imports megatron.core, then `initialize()`. Names are resolved lazily so that `stack_report`
does not import torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "install": "devices",
    "device": "devices",
    "layer_backend": "devices",
    "matmul_float32": "devices",
    "host_buffer": "devices",
    "optimizer_offload": "devices",
    "transformer_defaults": "devices",
    "initialize": "world",
    "World": "world",
    "gather_json": "world",
    "unpadded_offsets": "bucket_padding",
    "stack_report": "stack",
    "Component": "stack",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
