"""TransformerEngine's real Python layer without its C++ module, CUDA libraries or a GPU.

Two things stop `import transformer_engine` on such a machine: the CUDA libraries, which TE's own NVTE_PROJECT_BUILDING switch skips,
and the C++ module `transformer_engine_torch`. `install` puts a module with the same names in its place: enums have their real values,
and every function raises UnavailableKernel, so that nothing is ever taken for a real kernel. te_kernels.py adds torch versions of a few.
"""

import enum
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

TABLE = Path(__file__).parent.parent / "data" / "te" / "extension.json"
"""What the C++ module exports; tools/te_extension_table.py writes it from TE's source distribution."""

# Questions that TE's Python code asks while it builds modules; the answers are the GPU image's.
_ANSWERS = {
    "get_cudnn_version": 92000,
    "get_cublasLt_version": 130100,
    "get_num_cublas_streams": 4,
    "get_stream_priority_range": (0, -5),
    "ubuf_built_with_mpi": False,
    "nvte_built_with_cublasmp": False,
    "device_supports_multicast": False,
}


class UnavailableKernel(NotImplementedError):
    """A function of the C++ module was called."""


class FP8TensorMeta:
    """Scaling state of one module; a plain record in C++ too."""

    scale = scale_inv = amax_history = None


def install() -> ModuleType:
    """The stand-in for the C++ module, after transformer_engine.pytorch has been imported on top of it. Once per process."""
    table = json.loads(TABLE.read_text())
    installed = importlib.metadata.version("transformer-engine")
    if installed != table["version"]:
        raise RuntimeError(f"{TABLE} is for {table['version']}, installed is {installed}: rerun tools/te_extension_table.py")
    extension = _module("transformer_engine_torch", table)
    # The package imports its torch part at once, so `common`, which would load the shared objects, has to be there before it.
    spec = importlib.util.find_spec("transformer_engine")
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    with mock.patch.dict(os.environ, NVTE_PROJECT_BUILDING="1"):
        package.common = importlib.import_module("transformer_engine.common")
    package.common.load_framework_extension = _loader(extension)
    spec.loader.exec_module(package)
    importlib.import_module("transformer_engine.pytorch")
    return extension


def _loader(extension: ModuleType) -> Callable[[str], None]:
    def load_framework_extension(framework: str) -> None:
        if framework != "torch":
            raise FileNotFoundError("Could not find shared object file")
        sys.modules["transformer_engine_torch"] = extension

    return load_framework_extension


def _module(name: str, table: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    for enum_name, members in table["enums"].items():
        setattr(module, enum_name, enum.IntEnum(enum_name, members))
    for class_name in table["classes"]:
        setattr(module, class_name, type(class_name, (), {"__init__": _unavailable(f"{name}.{class_name}")}))
    for function in table["functions"]:
        setattr(module, function, _unavailable(f"{name}.{function}"))
    for submodule, functions in table["submodules"].items():
        setattr(module, submodule, ModuleType(f"{name}.{submodule}"))
        for function in functions:
            setattr(getattr(module, submodule), function, _unavailable(f"{name}.{submodule}.{function}"))
    for function, answer in _ANSWERS.items():
        setattr(module, function, lambda *_, answer=answer, **__: answer)
    module.FP8TensorMeta = FP8TensorMeta
    return module


def _unavailable(name: str) -> Callable[..., Any]:
    def unavailable(*_: Any, **__: Any) -> Any:
        raise UnavailableKernel(f"{name} needs TransformerEngine's C++ module and a GPU")

    return unavailable
