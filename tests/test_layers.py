"""Dependencies point one way, files stay small, and only platform/ knows cpu from cuda."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"config"},
    {"platform"},
    {"kernels", "precision"},
    {"models"},
    {"conversion"},
    {"transports", "algorithms", "envs", "traces"},
    {"evals"},
    {"trainer", "inference", "orchestrator", "parity"},
    {"launch"},
    {"cli"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
LIGHT = ("config", "transports", "envs", "traces", "evals", "orchestrator", "launch", "cli")
"""Rooms whose modules import without torch and Megatron: they run in the launcher and the orchestrator."""


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, kernels/ under the name it is imported by."""
    found = {}
    for folder, package in ((ROOT / "megatron_rl", "megatron_rl"), (ROOT / "kernels", "megatron_rl.kernels")):
        for path in folder.rglob("*.py"):
            parts = list(path.relative_to(folder).with_suffix("").parts)
            found[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return found


@cache
def imports(module: str, in_functions: bool = True) -> list[tuple[str, int]]:
    """(imported module of ours, line), wherever in the file the import stands, or only what importing the module imports."""
    path = sources()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in walk(ast.parse(path.read_text()), in_functions):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *([base] if base else [])])
            found += [(f"{base}.{a.name}" if f"{base}.{a.name}" in sources() else base, node.lineno) for a in node.names]
    return [(name, line) for name, line in found if name.startswith("megatron_rl.")]


def walk(node: ast.AST, in_functions: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        if in_functions or not later:
            yield from walk(child, in_functions)


def room(module: str) -> str:
    name = module.split(".")[1] if "." in module else ""
    return "cli" if name == "cli_help" else name


def test_every_room_has_a_layer():
    assert {room(module) for module in sources()} - {""} <= set(LEVEL)


def test_imports_point_down_and_never_sideways():
    wrong = [
        f"{sources()[module].relative_to(ROOT)}:{line}: {room(module)} imports {name}"
        for module in sources()
        for name, line in imports(module)
        if room(module) and room(name) != room(module) and LEVEL[room(name)] >= LEVEL[room(module)]
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others():
    def below(module: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, _ in imports(module, in_functions=False):
            if name in path:
                yield (*path[path.index(name) :], name)
            elif name in sources() and name not in done:
                yield from below(name, (*path, name))
        done.add(module)

    done: set[str] = set()
    cycles = [" -> ".join(cycle) for module in sources() for cycle in below(module, (module,))]
    assert cycles == []


def test_no_file_is_longer_than_800_lines():
    long = {path.relative_to(ROOT): n for path in sources().values() if (n := len(path.read_text().splitlines())) > 800}
    assert long == {}


def test_no_module_is_a_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
    assert [module for module in sources() if drawers & set(module.split("."))] == []


def test_light_rooms_import_without_torch():
    modules = [module for module in sources() if room(module) in LIGHT]
    heavy = ("torch", "megatron.core", "vllm", "transformer_engine")
    program = f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; print([h for h in {heavy!r} if h in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_only_platform_asks_for_the_device():
    asking = []
    for module, path in sources().items():
        if room(module) == "platform":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and (
                node.attr == "is_cuda" or (node.attr == "cuda" and not isinstance(node.ctx, ast.Store))
            ):
                asking.append(f"{path.relative_to(ROOT)}:{node.lineno}: .{node.attr}")
    assert asking == []
