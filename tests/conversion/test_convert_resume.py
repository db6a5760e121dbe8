"""A conversion that was killed leaves no destination, and --resume does only what is missing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from hf_directories import assert_same, tensors_of
from test_convert import QUIET, to_hf, to_layout, to_megatron
from tiny_models import write_qwen3_moe

from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.conversion.hf_to_megatron import hf_to_megatron
from megatron_rl.conversion.partial import Partial

FILE_BYTES = 40_000
PROGRAMS = {
    "hf-to-megatron": "from test_convert import *; to_megatron(Path(S), Path(D), ParallelConfig(), file_bytes=40_000)",
    "megatron-to-hf": "from test_convert import *; to_hf(Path(S), Path(D), shard_bytes=40_000)",
    "reshard": "from test_convert import *; to_layout(Path(S), Path(D), ParallelConfig(), file_bytes=40_000)",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_qwen3_moe(folder / "hf", num_hidden_layers=8)
    to_megatron(folder / "hf", folder / "megatron", ParallelConfig(expert_parallel=2))
    return {"hf-to-megatron": folder / "hf", "megatron-to-hf": folder / "megatron", "reshard": folder / "megatron"}


def _kill_midway(program: str, source, destination) -> list[str]:
    """Files that the killed conversion had finished."""
    journal = destination.with_name(destination.name + ".partial") / "conversion.jsonl"
    code = f"import sys; sys.path[:0] = {sys.path!r}; S, D = {str(source)!r}, {str(destination)!r}; {program}"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 300
    while not (journal.exists() and journal.read_text().count("\n") > 6) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the conversion had ended before it could be killed"
    return [json.loads(line)["file"] for line in journal.read_text().splitlines()[1:] if line.endswith("}")]


@pytest.mark.parametrize("direction", PROGRAMS)
def test_killed_then_resumed_equals_never_killed(direction, sources, tmp_path):
    source, out, partial = sources[direction], tmp_path / "out", tmp_path / "out.partial"
    finished = _kill_midway(PROGRAMS[direction], source, out)
    assert len(finished) >= 5 and not out.exists()
    # What is finished is not written again: its time stays. A finished file that was damaged since is.
    stamps = {file: (partial / file).stat().st_mtime_ns for file in finished if file.endswith((".distcp", ".safetensors"))}
    broken = finished[-1]
    data = bytearray((partial / broken).read_bytes())
    data[len(data) // 2] ^= 1
    (partial / broken).write_bytes(data)
    if direction == "hf-to-megatron":
        to_megatron(source, out, ParallelConfig(), file_bytes=FILE_BYTES, resume=True, check=True)
        back = to_hf(out, tmp_path / "back")
    elif direction == "reshard":
        to_layout(source, out, ParallelConfig(), file_bytes=FILE_BYTES, resume=True, check=True)
        back = to_hf(out, tmp_path / "back")
    else:
        back = to_hf(source, out, shard_bytes=FILE_BYTES, resume=True, check=True)
    assert_same(tensors_of(back), tensors_of(sources["hf-to-megatron"]))
    assert all((out / file).stat().st_mtime_ns == stamp for file, stamp in stamps.items() if file != broken)
    assert not partial.exists() and not (out / "conversion.jsonl").exists()


def test_a_partial_destination_of_something_else_is_not_continued(sources, tmp_path):
    source, out = sources["hf-to-megatron"], tmp_path / "out"
    _kill_midway(PROGRAMS["hf-to-megatron"], source, out)
    with pytest.raises(ConfigError, match=r"out\.partial is of another conversion"):
        hf_to_megatron(source, out, ParallelConfig(tensor_parallel=2), resume=True, check=False, console=QUIET, file_bytes=FILE_BYTES)
    (tmp_path / "out.partial" / "conversion.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"out\.partial has no conversion\.jsonl that could be read"):
        hf_to_megatron(source, out, ParallelConfig(), resume=True, check=False, console=QUIET, file_bytes=FILE_BYTES)


def test_resume_without_anything_begun_just_converts(sources, tmp_path):
    to_megatron(sources["hf-to-megatron"], tmp_path / "out", resume=True)
    assert torch.equal(
        tensors_of(to_hf(tmp_path / "out", tmp_path / "back"))["model.norm.weight"],
        tensors_of(sources["hf-to-megatron"])["model.norm.weight"],
    )


@pytest.mark.parametrize("direction", ["hf-to-megatron", "reshard"])
def test_a_conversion_killed_at_its_very_end_lists_no_checksum_of_the_list_itself(direction, sources, tmp_path, monkeypatch):
    """The list is among the finished files then; it is written anew, so a checksum of the old one would call the directory damaged."""
    convert = {"hf-to-megatron": to_megatron, "reshard": to_layout}[direction]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Partial, "complete", _interrupted)
        convert(sources[direction], tmp_path / "out", ParallelConfig())
    out = convert(sources[direction], tmp_path / "out", ParallelConfig(), resume=True)
    assert "megatron_rl.json" not in json.loads((out / "megatron_rl.json").read_text())["xxh3"]
    back = to_hf(out, tmp_path / "back", check=True)  # sums up all that is listed
    assert_same(tensors_of(back), tensors_of(sources["hf-to-megatron"]))


def _interrupted(partial: Partial) -> None:
    raise KeyboardInterrupt
