"""Everything of an HF directory but the weights: the engine and a later run need it."""

import json
import shutil
from pathlib import Path

import torch

from megatron_rl.config.hf_directory import INDEX
from megatron_rl.models.family import HFConfig

_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "additional_chat_templates/*.jinja")


def copy_companions(source: Path, target: Path) -> None:
    """config.json, generation config, tokenizer and chat template, byte by byte."""
    for pattern in _PATTERNS:
        for path in source.glob(pattern):
            if path.name != INDEX:
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def write_config(directory: Path, hf: HFConfig, dtype: torch.dtype) -> None:
    """config.json with the dtype of the weights."""
    config = {key: value for key, value in hf.items() if key != "torch_dtype"}
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
