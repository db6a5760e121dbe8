"""Loading broken and narrower checkpoints, and saving a directory that stands alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_models import write_qwen3
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.ranks
COMPANIONS = {
    "generation_config.json": '{"temperature": 0.6}',
    "tokenizer_config.json": '{"chat_template": "x"}',
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "vocab.json": "{}",
    "merges.txt": "a b",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("conversion") / "good"
    write_qwen3(path, tied=True)
    for name, text in COMPANIONS.items():
        (path / name).write_text(text)
    return path


def _variant(good: Path, name: str, change):
    path = good.with_name(name)
    shutil.copytree(good, path)
    tensors = load_file(good / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def report(good):
    norm, query = "model.norm.weight", "model.layers.2.self_attn.q_proj.weight"
    twin = _variant(good, "twin", lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    broken = [
        _variant(good, "missing", lambda t: t.pop(query)),
        _variant(good, "unexpected", lambda t: t.update({"model.layers.2.self_attn.q_proj.bias": torch.zeros(64)})),
        _variant(good, "misshaped", lambda t: t.update({norm: torch.ones(49)})),
    ]
    target = f"{Path(__file__).parent}/conversion_cases.py:main"
    return run_ranks(target, 1, [str(path) for path in (good, twin, *broken)])[0]


def test_broken_checkpoints_are_one_line_with_file_and_tensor(good, report):
    folder = good.parent
    assert report["errors"] == {
        "missing": f"{folder}/missing: tensor model.layers.2.self_attn.q_proj.weight is missing",
        "unexpected": f"{folder}/unexpected/model.safetensors: unexpected tensor model.layers.2.self_attn.q_proj.bias; "
        "config.json describes a qwen3 model without it",
        "misshaped": f"{folder}/misshaped/model.safetensors: tensor model.norm.weight has shape [49], config.json asks for [48]",
    }


def test_bfloat16_checkpoint_widens_exactly_into_a_float32_model(good, report):
    twin = load_file(good.with_name("twin") / "model.safetensors")
    assert report["widened"] == {name: ["torch.float32", tensor.double().sum().item()] for name, tensor in twin.items()}


def test_saved_directory_replaces_the_old_one_and_carries_everything(good, report):
    saved = Path(f"{good}.saved")
    assert {path.name for path in saved.iterdir()} == {
        *COMPANIONS,
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00001.safetensors",
    }
    assert all((saved / name).read_text() == text for name, text in COMPANIONS.items())
    config, source = (json.loads((path / "config.json").read_text()) for path in (saved, good))
    assert config == source and config["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    assert model.model.norm.weight.abs().max() == 0
