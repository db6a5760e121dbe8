"""Reading a version: any difference between files and manifest is refused, and named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.transports.weights.base import WeightTransferError
from megatron_rl.transports.weights.manifest import Manifest
from megatron_rl.transports.weights.verify import entry_of, read_version


@pytest.fixture
def version(tmp_path: Path) -> tuple[Path, Manifest]:
    tensors = {"first": torch.arange(8.0), "second": torch.ones(3, 2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "f.safetensors")
    return tmp_path, Manifest(1, tuple(entry_of(name, tensor, "f.safetensors") for name, tensor in tensors.items()))


def refused(directory: Path, manifest: Manifest, verify: bool = True) -> WeightTransferError:
    with pytest.raises(WeightTransferError) as caught:
        read_version(directory, manifest, verify)
    return caught.value


def test_the_copy_is_independent_of_the_file(version):
    directory, manifest = version
    tensors = read_version(directory, manifest)
    flip_byte(directory / "f.safetensors", -1)
    (directory / "f.safetensors").unlink()
    assert tensors["first"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7] and tensors["second"].float().sum() == 6


@pytest.mark.parametrize(("offset", "tensor"), [(-1, "second"), (-12, "second"), (-13, "first"), (-44, "first")])
def test_one_flipped_byte_is_found_and_its_tensor_named(version, offset, tensor):
    directory, manifest = version  # safetensors puts wider types first: 32 bytes of first, then 12 of second
    flip_byte(directory / "f.safetensors", offset)
    error = refused(directory, manifest)
    assert error.tensor == tensor and "its sender computed" in str(error)
    assert set(read_version(directory, manifest, verify=False)) == {"first", "second"}


def test_shape_and_dtype_are_compared_without_checksums_too(version):
    directory, manifest = version
    first, second = manifest.tensors
    assert refused(directory, replace(manifest, tensors=(replace(first, shape=(4, 2)), second)), verify=False).tensor == "first"
    assert refused(directory, replace(manifest, tensors=(first, replace(second, dtype="float16"))), verify=False).tensor == "second"


def test_a_tensor_missing_from_its_file_is_named(version):
    directory, manifest = version
    error = refused(directory, replace(manifest, tensors=(*manifest.tensors, replace(manifest.tensors[0], name="third"))))
    assert error.tensor == "third" and "not in f.safetensors" in str(error)


def test_a_tensor_that_the_manifest_does_not_list_is_named(version):
    directory, manifest = version
    error = refused(directory, replace(manifest, tensors=manifest.tensors[:1]))
    assert error.tensor == "second"


def test_a_truncated_or_absent_file_is_named(version):
    directory, manifest = version
    path = directory / "f.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert str(path) in str(refused(directory, manifest))
    path.unlink()
    assert str(path) in str(refused(directory, manifest))


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
