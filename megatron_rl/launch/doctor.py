"""`megatron-rl doctor`: what is installed, what this machine can run with it, and what to do about the rest."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator

import psutil
from rich.console import Console
from rich.table import Table as Grid

from megatron_rl.platform import stack_report

NEEDS = {
    "rl": ("torch", "megatron-core", "vllm", "transformers"),
    "sft, trainer": ("torch", "megatron-core", "transformers"),
    "eval, inference": ("torch", "vllm", "transformers"),
    "orchestrator": ("transformers",),
    "[[*.source]] env.name = \"reasoning_gym\"": ("reasoning-gym",),
}  # fmt: skip
"""Subcommand (or part of a config) -> components without which it can't run."""
INSTALL = "`make venv` (CPU) or the Dockerfile (GPU) installs the tested set"
GIB = 1 << 30


def main(console: Console) -> None:
    """Print the report."""
    rows = list(stack_report())
    missing = {row.name for row in rows if row.version == "missing"}
    missing |= {name for name in ("reasoning-gym",) if not _importable(name)}
    grid = Grid("component", "version", "what it enables here", title="installed", title_justify="left")
    grid.add_row("python", ".".join(map(str, sys.version_info[:3])), sys.executable)
    for row in rows:
        grid.add_row(row.name, f"[red]{row.version}[/red]" if row.version == "missing" else row.version, row.enables)
    console.print(grid)
    grid = Grid("subcommand", "", "", title="what this machine can run", title_justify="left", show_header=False)
    for name, needs in NEEDS.items():
        lacking = [need for need in needs if need in missing]
        grid.add_row(name, "[red]no[/red]" if lacking else "[green]yes[/green]", f"lacks {', '.join(lacking)}" if lacking else "")
    console.print(grid)
    remedies = [f"{row.name}: {row.remedy}" for row in rows if row.remedy]
    if any(need in missing for needs in NEEDS.values() for need in needs):
        remedies.insert(0, INSTALL)
    remedies += _resources()
    console.print("remedies" if remedies else "nothing to remedy", style="bold")
    for remedy in remedies:
        console.print(f"  {remedy}", markup=False, highlight=False, soft_wrap=True)


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def _resources() -> Iterator[str]:
    """Shortages of this machine that would show up late."""
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(".")
    if memory.available < 6 * GIB:
        yield f"memory: {memory.available / GIB:.1f} GiB are available; an engine and a trainer rank of a tiny model take about 5 GiB"
    if disk.free < 5 * GIB:
        yield f"disk: {disk.free / GIB:.1f} GiB are free in {os.getcwd()}; checkpoints and weight versions go to run.root"
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if shm < GIB // 4:
        yield f"/dev/shm: {shm / GIB:.2f} GiB are free; an engine with inference.tensor_parallel > 1 exchanges tensors there"
