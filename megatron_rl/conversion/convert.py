"""`megatron-rl convert`: which conversion, with which options."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.hf_to_megatron import hf_to_megatron
from megatron_rl.conversion.megatron_to_hf import megatron_to_hf
from megatron_rl.conversion.quantize import RecipeName
from megatron_rl.conversion.reshard import reshard


def main(
    direction: str,
    source: Path,
    destination: Path,
    layout: dict[str, Any],
    hf_dir: Path | None,
    quantize: RecipeName | None,
    resume: bool,
    check: bool,
    console: Console,
) -> None:
    """Raises ConfigError for every mistake of the user; `layout` has the fields of ParallelConfig that were given."""
    if wrong := [name for name, size in layout.items() if name != "pipeline_layers" and size < 1]:
        raise ConfigError(f"--{wrong[0].replace('_', '-')} = {layout[wrong[0]]}: must be 1 or more")
    if quantize and direction != "megatron-to-hf":
        raise ConfigError(f"--quantize: {direction} keeps every bit; leave it out")
    if not quantize:
        torch.set_num_threads(1)  # all it does is copy
    if direction == "hf-to-megatron":
        if hf_dir:
            raise ConfigError("--model: hf-to-megatron reads SRC alone; leave it out")
        hf_to_megatron(source, destination, ParallelConfig(**layout), resume=resume, check=check, console=console)
    elif direction == "reshard":
        reshard(source, destination, ParallelConfig(**layout), hf_dir, resume=resume, check=check, console=console)
    else:
        if layout:
            raise ConfigError(f"--{next(iter(layout)).replace('_', '-')}: an HF directory has no layout; leave it out")
        megatron_to_hf(source, destination, hf_dir, quantize, resume=resume, check=check, console=console)
    console.print(f"{destination} is ready", highlight=False, markup=False, soft_wrap=True)
