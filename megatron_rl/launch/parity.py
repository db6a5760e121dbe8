"""`megatron-rl parity`: one process of transformers and the ranks of one layout on this machine, then the comparison."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from megatron_rl.config.base import ConfigError
from megatron_rl.config.hf_directory import read_json
from megatron_rl.config.parity import ParityConfig
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion import directory
from megatron_rl.launch.commands import rank_environments, run_environment
from megatron_rl.launch.ports import free_ports
from megatron_rl.launch.processes import RunFailed, Supervisor
from megatron_rl.models import check_supported, family_of
from megatron_rl.models.family import HFConfig
from megatron_rl.parity import report
from megatron_rl.parity.documents import micro_batches

WIDTH = 130
"""Of the table, where it is not for a terminal."""


def main(config: ParityConfig, as_json: bool) -> None:
    """Print the table (or JSON, and nothing else, on standard output).

    Raises:
        ConfigError: the directory or the layout is not one to compare; nothing was started.
        RunFailed: the two sides differ, or a process died.
    """
    console = Console(stderr=as_json)
    console.width = console.width if console.is_terminal else WIDTH
    hf = check(config)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megatron-rl-parity-") as folder:
        run(config, Path(folder), console)
        groups = report.groups_of(family_of(hf), hf)
        rows = report.compare(Path(folder), groups, micro_batches(config, hf["vocab_size"]), *config.bounds, config.steps)
    failed = [row for row in rows if not row.passed]
    if as_json:
        print(json.dumps({"config": config.model_dump(), "passed": not failed, "rows": report.as_json(rows)}, indent=2))
    else:
        console.print(report.table(rows, _title(config, hf)))
        console.print(f"{time.monotonic() - started:.0f} s", highlight=False)
    if failed:
        parts = (f"{row.label} ({row.worst})" for row in failed)
        raise RunFailed(f"parity: {config.model} differs from transformers: {'; '.join(parts)}")


def check(config: ParityConfig) -> HFConfig:
    """config.json of a directory that can be compared on this layout; ConfigError otherwise, of the first kind of mistake found."""
    model = Path(config.model)
    if not model.is_dir():
        raise ConfigError(f"model: {model} is not a directory; give a local HF model directory (config.json and *.safetensors)")
    try:
        hf = read_json(model / "config.json")
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    problems = check_supported(hf, config)
    if not problems and (problem := config.problem_with(config.world_size)):
        problems = [problem]
    if problems:
        raise ConfigError(*problems)
    if problems := list(directory.problems(model, hf, family_of(hf))):
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise ConfigError(f"model: {problems[0]}{more}")
    return hf


def run(config: ParityConfig, folder: Path, console: Console) -> None:
    """Both sides, to their end; their tensors are in `folder` then. The log of a failed process is kept elsewhere."""
    settings = folder / "settings.json"
    settings.write_text(config.model_dump_json())
    with console.status("transformers and the ranks compute"), Supervisor(folder, run_environment()) as supervisor:
        ends = [supervisor.start("transformers", _module("oracle", settings, folder))]
        for rank, environment in enumerate(rank_environments(config.world_size, free_ports(1)[0], None)):
            ends.append(supervisor.start(f"rank_{rank}", _module("ranks", settings, folder), environment))
        try:
            supervisor.wait(*ends)
        except RunFailed as failure:
            kept = Path(tempfile.mkdtemp(prefix="megatron-rl-parity-logs-"))
            for log in folder.glob("*.log"):
                shutil.copy(log, kept)
            raise RunFailed(str(failure).replace(str(folder), str(kept)), failure.code) from None


def _module(name: str, settings: Path, folder: Path) -> list[str]:
    return [sys.executable, "-m", f"megatron_rl.parity.{name}", str(settings), str(folder)]


def _title(config: ParityConfig, hf: HFConfig) -> str:
    sizes = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in config.model_dump(include=set(ParallelConfig.model_fields)).items()
        if name.endswith("_parallel") and value not in (None, 1)
    )
    ranks = f"{config.world_size} rank{'s' if config.world_size > 1 else ''}"
    steps = f", parameters after {config.steps} steps of SGD" if config.steps else ""
    return f"{family_of(hf).name} against transformers: {ranks}{f' ({sizes})' if sizes else ''}, {config.dtype}{steps}"
