"""What runs in the process of tests/te/test_te_extension.py."""

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import te_extension
import te_kernels
import torch
import torch.nn.functional as F
from pretend_gpu import pretend_gpu
from torch import Tensor

from megatron_rl import platform


def main(_: list[str]) -> dict:
    platform.install()
    extension = te_extension.install()
    try:
        extension.gelu(None, None)
    except te_extension.UnavailableKernel as error:
        refusal = str(error)
    te_kernels.install(extension)
    torch.manual_seed(0)
    with pretend_gpu("H100"):
        differences = _differences()
    return {"refusal": refusal, "unknown": _unknown_names(extension), "differences": differences, "absent": _absent_imports()}


def _unknown_names(extension: ModuleType) -> list[str]:
    """Names that TE's Python code takes from the C++ module and that ours does not have."""
    used = set()
    for path in Path(sys.modules["transformer_engine"].__file__).parent.joinpath("pytorch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "transformer_engine_torch":
                used |= {alias.name for alias in node.names} - {"*"}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tex":
                used.add(node.attr)
    assert len(used) > 100
    return sorted(name for name in used if not hasattr(extension, name))


def _absent_imports() -> list[str]:
    """`from transformer_engine... import name` in Megatron of what this TE does not have: "file: module.name", with the kind of guard."""
    root = Path(importlib.import_module("megatron.core").__file__).parent
    absent = []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
                absent += [
                    f"{path.relative_to(root)}: {node.module}.{alias.name} ({_guard(tree, node)})"
                    for alias in node.names
                    if not _importable(node.module, alias.name)
                ]
    return absent


def _importable(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False


def _guard(tree: ast.AST, node: ast.AST) -> str:
    """What keeps a failing import from mattering: "try", "version", or "none"."""
    for outer in ast.walk(tree):
        inside = any(child is node for child in ast.walk(outer))
        if isinstance(outer, ast.Try) and inside and any(_catches_import_error(handler) for handler in outer.handlers):
            return "try"
        if isinstance(outer, ast.If) and inside and "version" in ast.unparse(outer.test):
            return "version"
    return "none"


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(name in ast.unparse(handler.type) for name in ("ImportError", "ModuleNotFoundError", "Exception"))


def _differences() -> dict[str, float]:
    """Largest relative difference of output, input gradient and parameter gradients, TE's module against torch autograd."""
    import transformer_engine.pytorch as te

    x = torch.randn(6, 2, 48)
    found = {
        "linear": _compare(te.Linear(48, 80, device="cpu"), x, lambda x, p: x @ p["weight"].t() + p["bias"]),
        "rmsnorm": _compare(te.RMSNorm(48, device="cpu"), x, lambda x, p: _rms_norm(x, p["weight"])),
        "norm and linear": _compare(
            te.LayerNormLinear(48, 80, bias=False, normalization="RMSNorm", device="cpu"),
            x,
            lambda x, p: _rms_norm(x, p["layer_norm_weight"]) @ p["weight"].t(),
        ),
    }
    rows = [5, 0, 7]  # an expert without tokens
    found["grouped linear"] = _compare(
        te.GroupedLinear(3, 48, 80, bias=True, device="cpu"),
        torch.randn(12, 48),
        lambda x, p: torch.cat([part @ p[f"weight{i}"].t() + p[f"bias{i}"] for i, part in enumerate(x.split(rows))]),
        rows,
    )
    return found


def _compare(module: torch.nn.Module, x: Tensor, plain, *args) -> float:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters()}
    output, expected = module(mine, *args), plain(theirs, copies)
    grad = torch.randn_like(expected)
    output.backward(grad)
    expected.backward(grad)
    pairs = [(output, expected), (mine.grad, theirs.grad), *((p.grad, copies[name].grad) for name, p in module.named_parameters())]
    return max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps=1e-5)
