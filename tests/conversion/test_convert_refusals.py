"""What is wrong with a conversion is one line that names the file and the tensor; source and destination stay as they were."""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_directories import in_shards, tensors_of, variant
from test_convert import QUIET, to_hf, to_layout, to_megatron
from tiny_models import write_qwen3

from megatron_rl.cli import main
from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion import megatron_model
from megatron_rl.conversion.convert import main as convert

QUERY, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    path = tmp_path_factory.mktemp("refusals") / "hf"
    write_qwen3(path, tied=True, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def megatron(hf):
    return to_megatron(hf, hf.with_name("megatron"))


def refusal(action, *parts) -> str:
    """The one line with which it is refused, paths cut out; nothing is left behind."""
    folder = parts[0].parent
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        action()
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return str(caught.value).replace(f"{folder}/", "")


TENSORS = {
    "missing": (lambda t: t.pop(QUERY), None, f"bad: tensor {QUERY} is missing"),
    "misnamed": (
        lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}),
        None,
        "bad/model.safetensors: unexpected tensor model.layers.1.self_attn.q_proj.bias; config.json describes a qwen3 model without it",
    ),
    "misshaped": (
        lambda t: t.update({NORM: torch.ones(49)}),
        None,
        f"bad/model.safetensors: tensor {NORM} has shape [49], config.json asks for [48]",
    ),
    "float16": (
        lambda t: t.update({NORM: t[NORM].half()}),
        None,
        f"bad/model.safetensors: tensor {NORM} is F16; the trainer holds F32 and BF16, save it as one of them",
    ),
    "two types in one": (
        lambda t: t.update({QUERY: t[QUERY].bfloat16()}),
        None,
        f"bad/model.safetensors: tensor {QUERY.replace('q_proj', 'k_proj')} is F32, but {QUERY} is BF16, and the two are parts of one "
        f"Megatron tensor (decoder.layers.2.self_attention.linear_qkv.weight); save them as one type",
    ),
    "untied": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        None,
        "bad/model.safetensors: tensor lm_head.weight differs from model.embed_tokens.weight, though config.json ties them "
        "(tie_word_embeddings); drop it, or set tie_word_embeddings to false",
    ),
    "too few layers": (
        lambda t: [t.pop(name) for name in list(t) if "layers.1." in name and "input_layernorm" not in name],
        {"num_hidden_layers": 1},
        "bad/model.safetensors: unexpected tensor model.layers.1.input_layernorm.weight; config.json describes a qwen3 model without it",
    ),
    "unknown family": (
        lambda t: None,
        {"architectures": ["GPT2LMHeadModel"]},
        "config.json: architectures = ['GPT2LMHeadModel'] is not supported",
    ),
    "unknown rope": (
        lambda t: None,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "config.json: rope type 'dynamic' is not supported",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_directory_that_is_not_what_its_config_says(case, hf, tmp_path):
    change, config, message = TENSORS[case]
    bad = variant(hf, tmp_path / "bad", change, config)
    assert refusal(lambda: to_megatron(bad, tmp_path / "out", ParallelConfig()), bad).startswith(message)


def test_a_file_cut_short_and_an_index_that_lies(hf, tmp_path):
    cut = shutil.copytree(hf, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-10])
    assert refusal(lambda: to_megatron(cut, tmp_path / "out"), cut).startswith(
        "cut/model.safetensors is no safetensors file, or was cut short"
    )
    sharded = in_shards(hf, tmp_path / "sharded", 2)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    one, two = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == one)
    index["weight_map"][name] = two
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    message = f"sharded/{two}: tensor {name} is missing, though model.safetensors.index.json lists it"
    assert refusal(lambda: to_megatron(sharded, tmp_path / "out"), sharded) == message


def test_paths_and_layouts(hf, megatron, tmp_path):
    copy = shutil.copytree(hf, tmp_path / "hf")
    taken = tmp_path / "taken"
    taken.mkdir()
    assert refusal(lambda: to_megatron(copy, taken), copy) == "taken exists; delete it, or give another destination"
    assert "source and destination are the same directory" in refusal(lambda: to_megatron(copy, copy), copy)
    assert "the destination lies inside the source" in refusal(lambda: to_megatron(copy, copy / "sub"), copy)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "dangling exists" in refusal(lambda: to_megatron(copy, tmp_path / "dangling"), copy)
    for name in ("/", "..", "."):
        assert "must be a new directory's own name" in refusal(lambda name=name: to_megatron(copy, Path(name)), copy)
    assert "is not a directory" in refusal(lambda: to_hf(tmp_path / "none", tmp_path / "out"), copy)
    three = ParallelConfig(pipeline_parallel=3)
    assert "pipeline_parallel = 3 does not divide the model's 2 layers" in refusal(
        lambda: to_layout(megatron, tmp_path / "out", three), copy
    )
    with pytest.raises(ConfigError, match="--tensor-parallel: an HF directory has no layout"):
        convert("megatron-to-hf", megatron, tmp_path / "out", {"tensor_parallel": 2}, None, None, False, False, QUIET)
    with pytest.raises(ConfigError, match="--tensor-parallel = 0: must be 1 or more"):
        convert("hf-to-megatron", hf, tmp_path / "out", {"tensor_parallel": 0}, None, None, False, False, QUIET)


def test_a_megatron_directory_that_is_damaged(megatron, tmp_path):
    def damaged(name, change):
        path = shutil.copytree(megatron, tmp_path / name / "bad")
        change(path)
        return refusal(lambda: to_hf(path, path.with_name("out")), path)

    def newer(path):
        (path / megatron_model.MARKER).write_text('{"format": 2}')

    def cut(path):
        file = path / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-100])

    def contradict(path):
        config = json.loads((path / "hf" / "config.json").read_text())
        (path / "hf" / "config.json").write_text(json.dumps({**config, "intermediate_size": 88}))

    def without_norm(path):
        metadata = pickle.loads((path / ".metadata").read_bytes())
        del metadata.state_dict_metadata["decoder.final_norm.weight"]
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    def with_hole(path):
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.state_dict_metadata["decoder.layers.1.mlp.linear_fc1.weight"].chunks.pop()
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    def renamed(path):
        metadata = pickle.loads((path / ".metadata").read_bytes())
        stored = metadata.state_dict_metadata
        stored["decoder.layers.9.mlp.linear_fc1.weight"] = stored["decoder.layers.1.mlp.linear_fc1.weight"]
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    assert damaged("newer", newer) == "bad/megatron_rl.json: format 2, this version reads 1; use the version that wrote it"
    assert damaged("cut", cut).startswith("bad/__0_0.distcp: cut short: ")
    assert damaged("gone", lambda path: (path / "__0_0.distcp").unlink()).startswith(
        "bad/__0_0.distcp: No such file or directory; it holds "
    )
    assert damaged("contradict", contradict) == (
        "bad: tensor decoder.layers.1.mlp.linear_fc1.weight has shape [160, 48], bad/hf/config.json asks for [176, 48]"
    )
    assert damaged("without", without_norm) == "bad: tensor decoder.final_norm.weight (model.norm.weight) is missing"
    assert damaged("hole", with_hole) == "bad: tensor decoder.layers.1.mlp.linear_fc1.weight: its chunks hold 5760 of 7680 elements"
    assert damaged("renamed", renamed).startswith("bad: unexpected tensor decoder.layers.9.mlp.linear_fc1.weight; ")
    assert damaged("none", lambda path: (path / ".metadata").unlink()).startswith("bad/.metadata: No such file or directory")


def test_a_flipped_bit_of_a_megatron_source_is_noticed_before_anything_is_written(megatron, tmp_path):
    rotten = shutil.copytree(megatron, tmp_path / "rotten")
    file = rotten / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    message = "rotten/__0_0.distcp: damaged: it has not the checksum that megatron_rl.json says"
    assert refusal(lambda: to_hf(rotten, tmp_path / "out"), rotten) == message
    assert refusal(lambda: to_layout(rotten, tmp_path / "out", ParallelConfig()), rotten) == message


def test_too_little_room_is_said_before_anything_is_written(hf, tmp_path, monkeypatch):
    copy = shutil.copytree(hf, tmp_path / "hf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert refusal(lambda: to_megatron(copy, tmp_path / "out"), copy).startswith("out: needs 0.00 GB, ")


def test_the_command_says_it_in_one_line_and_exits_with_2(hf, tmp_path, capsys):
    bad = variant(hf, tmp_path / "bad", lambda t: t.pop(QUERY))
    assert main(["convert", "hf-to-megatron", str(bad), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {bad}: tensor {QUERY} is missing\n"
    assert main(["convert", "hf-to-megatron", str(hf), str(tmp_path / "out"), "--verify", "--tensor-parallel", "2"]) == 0
    assert main(["convert", "megatron-to-hf", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert "" not in capsys.readouterr().out.splitlines()
    assert tensors_of(tmp_path / "back").keys() == tensors_of(hf).keys()


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf", "reshard"])
def test_a_disk_that_fills_is_one_line_and_the_rest_is_resumed(direction, hf, megatron, tmp_path):
    source, tool = (
        hf if direction == "hf-to-megatron" else megatron,
        Path(__file__).parents[2] / "tools" / f"{direction.replace('-', '_')}.py",
    )
    command = [sys.executable, str(tool), str(source), str(tmp_path / "out")]
    limit = 50_000  # bytes that a file may have
    full = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env=os.environ,
    )
    assert full.returncode == 2, full.stderr
    assert full.stderr.startswith("error: ") and "File too large; the finished part is kept" in full.stderr and full.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "is left of a conversion that was cut short; continue it with --resume" in again.stderr
    assert subprocess.run([*command, "--resume", "--verify"]).returncode == 0
    assert not (tmp_path / "out.partial").exists()
