"""safetensors directories: what we write others read, what is wrong is one line that names the file and the tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.hf_io import INDEX, CheckpointReader, ShardWriter, TensorSpec

A, B = torch.arange(12.0).reshape(3, 4), torch.arange(5.0).bfloat16()
SPECS = [TensorSpec("a", (3, 4), torch.float32), TensorSpec("b", (5,), torch.bfloat16)]


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    return tmp_path


def _error(action):
    with pytest.raises(ConfigError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_written_shard_is_read_back_by_safetensors(tmp_path):
    with ShardWriter(tmp_path / "x.safetensors", SPECS) as writer:
        writer.write("a", A.t().contiguous().t())
        writer.write("b", B)
    read = load_file(tmp_path / "x.safetensors")
    assert torch.equal(read["a"], A) and torch.equal(read["b"], B) and read["b"].dtype == torch.bfloat16


def test_writer_refuses_another_order_and_a_missing_tensor(tmp_path):
    with pytest.raises(ValueError, match="expected"), ShardWriter(tmp_path / "x.safetensors", SPECS) as writer:
        writer.write("b", B)
    with pytest.raises(ValueError, match="1 announced tensors were not written, first b"), ShardWriter(tmp_path / "y", SPECS) as writer:
        writer.write("a", A)


def test_reader_reads_parts_of_single_files_and_shards(sharded, tmp_path_factory):
    single = tmp_path_factory.mktemp("single")
    save_file({"a": A, "b": B}, single / "model.safetensors")
    for directory in (sharded, single):
        reader = CheckpointReader(directory)
        assert torch.equal(reader.read("a", (3, 4), (slice(0, 3), slice(1, 3))), A[:, 1:3])
        assert torch.equal(reader.read("b", (5,), (slice(2, 5),)), B[2:])


def test_missing_tensor_names_directory_and_tensor(sharded):
    assert _error(lambda: CheckpointReader(sharded).read("c", (1,), (slice(0, 1),))) == f"{sharded}: tensor c is missing"


def test_wrong_shape_names_file_tensor_and_both_shapes(sharded):
    message = _error(lambda: CheckpointReader(sharded).read("a", (4, 3), (slice(0, 4), slice(0, 3))))
    assert message == f"{sharded / 'one.safetensors'}: tensor a has shape [3, 4], config.json asks for [4, 3]"


def test_missing_and_damaged_files_are_named(sharded):
    (sharded / "one.safetensors").unlink()
    (sharded / "two.safetensors").write_bytes(b"\x00" * 20)
    reader = CheckpointReader(sharded)
    assert "one.safetensors: missing, though" in _error(lambda: reader.read("a", (3, 4), (slice(0, 3), slice(0, 4))))
    assert "two.safetensors: damaged" in _error(lambda: reader.read("b", (5,), (slice(0, 5),)))


def test_directory_without_safetensors_is_refused(tmp_path):
    assert "no model.safetensors" in _error(lambda: CheckpointReader(tmp_path))
    (tmp_path / INDEX).write_text("{}")
    assert "no weight_map" in _error(lambda: CheckpointReader(tmp_path))
