"""The filesystem sender: what is offered is whole, whatever happens to the writer."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from megatron_rl.transports.weights import filesystem
from megatron_rl.transports.weights.base import WeightTransferError
from megatron_rl.transports.weights.filesystem import FilesystemSender, acknowledge, discard_newer, offer_checkpoint, version_dir, versions
from megatron_rl.transports.weights.manifest import Manifest
from megatron_rl.transports.weights.verify import read_version


@dataclass
class OneRank:
    rank: int = 0
    world_size: int = 1
    pipeline_rank: int = 0
    writes_stage: bool = True


def some_tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "plain": torch.full((3, 5), value),
        "half": torch.full((4,), value, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).t() + value,
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 7),
    }


def publish(run_dir: Path, version: int, value: float, keep_last: int = 2) -> FilesystemSender:
    sender = FilesystemSender(run_dir, keep_last)
    sender.publish(version, iter(some_tensors(value).items()), OneRank())
    return sender


def value_of(run_dir: Path, version: int) -> float:
    directory = version_dir(run_dir, version)
    return read_version(directory, Manifest.read(directory))["scalar"].item()


def test_every_tensor_arrives_bit_for_bit_in_order_with_its_dtype(tmp_path):
    publish(tmp_path, 3, 0.1)
    manifest = Manifest.read(version_dir(tmp_path, 3))
    received = read_version(version_dir(tmp_path, 3), manifest)
    sent = some_tensors(0.1)
    assert list(received) == list(sent) == [entry.name for entry in manifest.tensors]
    assert all(received[name].dtype == sent[name].dtype and torch.equal(received[name], sent[name]) for name in sent)
    assert manifest.version == 3


def test_checksums_are_xxh3_of_the_bytes_in_c_order(tmp_path):
    publish(tmp_path, 0, 0.0)
    found = {entry.name: entry.xxh3 for entry in Manifest.read(version_dir(tmp_path, 0)).tensors}
    # [[0, 1, 2], [3, 4, 5]] transposed, as little-endian float32
    rows = b"".join(int.to_bytes(bits, 4, "little") for bits in (0, 0x40400000, 0x3F800000, 0x40800000, 0x40000000, 0x40A00000))
    assert found["transposed"] == xxhash.xxh3_64_hexdigest(rows)
    assert found["empty"] == xxhash.xxh3_64_hexdigest(b"")


def test_a_reused_buffer_is_copied_before_the_next_tensor(tmp_path):
    buffer = torch.empty(4)

    def stream():
        for i in range(3):
            yield f"t{i}", buffer.fill_(i)

    FilesystemSender(tmp_path, 1).publish(0, stream(), OneRank())
    received = read_version(version_dir(tmp_path, 0), Manifest.read(version_dir(tmp_path, 0)))
    assert [tensor[0].item() for tensor in received.values()] == [0, 1, 2]


def test_large_versions_are_split_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "SHARD_BYTES", 100)
    publish(tmp_path, 0, 1.0)  # 60 + 8 + 24 + 4 + 0 bytes: one shard of 96 bytes
    assert Manifest.read(version_dir(tmp_path, 0)).files == ["stage_0_0.safetensors"]
    monkeypatch.setattr(filesystem, "SHARD_BYTES", 70)
    publish(tmp_path, 1, 2.0)  # 60 + 8 | 24 + 4 + 0
    assert Manifest.read(version_dir(tmp_path, 1)).files == ["stage_0_0.safetensors", "stage_0_1.safetensors"]
    assert value_of(tmp_path, 1) == 2.0


def test_a_version_offered_again_is_replaced_and_no_longer_acked(tmp_path):
    sender = publish(tmp_path, 1, 1.0)
    acknowledge(version_dir(tmp_path, 1), ["http://a"])
    assert sender.acked(1)
    publish(tmp_path, 1, 2.0)
    assert value_of(tmp_path, 1) == 2.0 and not sender.acked(1)


def test_pruning_keeps_the_last_acked_version_and_all_newer_ones(tmp_path):
    for version in range(5):
        sender = publish(tmp_path, version, float(version), keep_last=1)
    assert sender.prune() == []  # nothing acked: a slow reader may still be at any of them
    acknowledge(version_dir(tmp_path, 2), [])
    assert sender.prune() == [0, 1]
    assert versions(tmp_path) == [2, 3, 4]
    acknowledge(version_dir(tmp_path, 4), [])
    sender.keep_last = 2
    assert sender.prune() == [2]
    assert versions(tmp_path) == [3, 4] and value_of(tmp_path, 3) == 3.0


def test_a_resumed_run_takes_back_the_versions_it_will_make_anew(tmp_path):
    for version in (3, 4, 10):
        publish(tmp_path, version, float(version))
    assert discard_newer(tmp_path, 4) == [10]
    assert versions(tmp_path) == [3, 4]
    assert discard_newer(tmp_path / "absent", 4) == []


def test_a_version_without_tensors_is_refused(tmp_path):
    with pytest.raises(WeightTransferError, match="version 0 has no tensors"):
        FilesystemSender(tmp_path, 1).publish(0, iter(()), OneRank())
    assert versions(tmp_path) == []


KILLED = """
import sys, time
import torch
from test_weight_sender import OneRank
from megatron_rl.transports.weights import filesystem

filesystem.SHARD_BYTES = 4096
def stream():
    for i in range(40):
        yield f"t{i}", torch.full((512,), float(i))
    print("mid-way", flush=True)
    time.sleep(60)
filesystem.FilesystemSender(sys.argv[1], 1).publish(1, stream(), OneRank())
"""


def test_a_killed_writer_leaves_the_older_version_and_no_part_of_the_new_one(tmp_path):
    publish(tmp_path, 0, 5.0)
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parent)
    assert writer.stdout.readline() == b"mid-way\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert list((tmp_path / "weights" / "1.tmp").glob("*.safetensors"))  # it did write
    assert versions(tmp_path) == [0] and value_of(tmp_path, 0) == 5.0
    publish(tmp_path, 1, 6.0)
    assert versions(tmp_path) == [0, 1] and value_of(tmp_path, 1) == 6.0


FULL = """
import resource, signal, sys
import torch
from test_weight_sender import OneRank
from megatron_rl.transports.weights.base import WeightTransferError
from megatron_rl.transports.weights.filesystem import FilesystemSender

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
asked = []
def stream():
    for i in range(3):
        asked.append(i)
        yield f"t{i}", torch.zeros(4096)
try:
    FilesystemSender(sys.argv[1], 1).publish(1, stream(), OneRank())
except WeightTransferError as error:
    print(len(asked), error)
"""


def test_a_disk_that_refuses_the_bytes_is_named_and_the_export_is_still_run_to_its_end(tmp_path):
    publish(tmp_path, 0, 5.0)
    result = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert result.stdout.startswith("3 rank 0 cannot write the weights: "), result
    assert "stage_0_0.safetensors" in result.stdout and result.stdout.count("\n") == 1
    assert versions(tmp_path) == [0] and value_of(tmp_path, 0) == 5.0


RANK = """
import os, sys
import torch
import torch.distributed as dist
from test_weight_sender import OneRank
from megatron_rl.transports.weights import filesystem
from megatron_rl.transports.weights.base import WeightTransferError

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=3)
world = OneRank(rank, 3, pipeline_rank=rank % 2, writes_stage=rank < 2)  # rank 2: a second replica of stage 0
sender = filesystem.FilesystemSender(sys.argv[1], 1)
def stream():
    dist.barrier()  # like an exporter, collective
    if rank < 2:
        yield f"stage{rank}", torch.full((4,), float(rank))
sender.publish(0, stream(), world)
filesystem.acknowledge(filesystem.version_dir(sys.argv[1], 0), [])
def broken(path):
    raise OSError(28, "No space left on device", str(path))
if rank == 1:
    filesystem.fsync_path = broken
try:
    sender.publish(1, stream(), world)
except WeightTransferError as error:
    print(error, flush=True)
"""


@pytest.mark.ranks
def test_stages_are_merged_in_order_and_one_rank_that_cannot_write_fails_all(tmp_path):
    # A file store: no port to collide on.
    code = RANK.replace('dist.init_process_group("gloo",', f'dist.init_process_group("gloo", init_method="file://{tmp_path}/store",')
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env={"RANK": str(rank), "PATH": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    manifest = Manifest.read(version_dir(tmp_path, 0))
    assert [(entry.name, entry.file) for entry in manifest.tensors] == [
        ("stage0", "stage_0_0.safetensors"),
        ("stage1", "stage_1_0.safetensors"),
    ]
    assert read_version(version_dir(tmp_path, 0), manifest)["stage1"].tolist() == [1, 1, 1, 1]
    assert versions(tmp_path) == [0]
    assert len(set(said)) == 1 and said[0].startswith("rank 1 cannot write the weights: [Errno 28] No space left on device")


def test_a_checkpoint_is_offered_as_it_is(tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    save_file({"scalar": torch.tensor(4.0)}, source / "model-00001-of-00002.safetensors")
    save_file({"other": torch.arange(3)}, source / "model-00002-of-00002.safetensors")
    save_file({"tok_embeddings.weight": torch.tensor(4.0)}, source / "consolidated.00.safetensors")  # the vendor's own format
    weight_map = {"scalar": "model-00001-of-00002.safetensors", "other": "model-00002-of-00002.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    directory = offer_checkpoint(source, tmp_path / "run", version=0)
    assert directory == version_dir(tmp_path / "run", 0)
    assert (directory / "model-00001-of-00002.safetensors").is_symlink()
    assert value_of(tmp_path / "run", 0) == 4.0
    assert [entry.name for entry in Manifest.read(directory).tensors] == ["scalar", "other"]
    with pytest.raises(WeightTransferError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        offer_checkpoint(tmp_path, tmp_path / "run", version=0)


def test_an_ack_names_the_engines_and_can_be_repeated(tmp_path):
    publish(tmp_path, 0, 1.0)
    for _ in range(2):
        acknowledge(version_dir(tmp_path, 0), ["http://a", "http://b"])
    assert json.loads((version_dir(tmp_path, 0) / "ACK").read_text()) == {"engines": ["http://a", "http://b"]}
