"""Versions as directories: `<run>/weights/<version>/{manifest.json, stage_<p>_<n>.safetensors, ACK}`.

The rename of `<version>.tmp` to `<version>` is the offer; ACK, written by the driver once every engine flipped, is its answer.
Whatever happens to the writer, a directory with a plain number for a name is whole.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.hf_directory import weight_files
from megatron_rl.transports.atomic import fsync_path, write_atomic
from megatron_rl.transports.weights.base import Ranks, WeightTransferError
from megatron_rl.transports.weights.manifest import MANIFEST, Manifest, TensorEntry
from megatron_rl.transports.weights.verify import entry_of

if TYPE_CHECKING:
    import torch

ACK = "ACK"
SHARD_BYTES = 2 << 30
"""Tensors are buffered up to this size before a file is written, which bounds the sender's memory."""


def weights_dir(run_dir: Path) -> Path:
    return Path(run_dir) / "weights"


def version_dir(run_dir: Path, version: int) -> Path:
    return weights_dir(run_dir) / str(version)


def versions(run_dir: Path) -> list[int]:
    """The versions on offer, oldest first."""
    root = weights_dir(run_dir)
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal()) if root.is_dir() else []


def acked(run_dir: Path, version: int) -> bool:
    """Whether every engine was found to hold `version`."""
    return (version_dir(run_dir, version) / ACK).exists()


def acknowledge(directory: Path, engines: list[str]) -> None:
    """Record that all engines hold the version in `directory`; durable when it returns, harmless to repeat."""
    write_atomic(directory / ACK, json.dumps({"engines": engines}).encode() + b"\n")


def discard_newer(run_dir: Path, version: int) -> list[int]:
    """Take back every version above `version`: a resumed run will make them anew. Returns them."""
    newer = [found for found in versions(run_dir) if found > version]
    for found in newer:
        _remove(version_dir(run_dir, found))
    return newer


def offer_checkpoint(hf_dir: Path, run_dir: Path, version: int = 0) -> Path:
    """Offer the weights of an HF directory as they are, by links to its safetensors files. Returns the version's directory.

    For engines without a trainer (evaluation): the same verified path brings the first weights. Raises WeightTransferError.
    """
    from safetensors import safe_open

    try:
        files = [hf_dir / name for name in weight_files(hf_dir)]
    except ValueError as error:
        raise WeightTransferError(str(error)) from error
    tmp = _fresh_tmp(run_dir, version)
    entries = []
    for file in files:
        (tmp / file.name).symlink_to(file.resolve())
        with safe_open(file, framework="pt", device="cpu") as source:
            entries += [entry_of(name, source.get_tensor(name), file.name) for name in source.keys()]  # noqa: SIM118
    return _offer(tmp, run_dir, Manifest(version, tuple(entries)))


class FilesystemSender:
    """The trainer's half. A failed publish leaves earlier versions as they were and shows no part of the new one."""

    def __init__(self, run_dir: str | Path, keep_last: int) -> None:
        self.run_dir = Path(run_dir)
        self.keep_last = keep_last
        self._is_first_rank = False

    def publish(self, version: int, tensors: "Iterator[tuple[str, torch.Tensor]]", world: Ranks) -> float:
        """Write and offer a version; collective over all trainer ranks, see WeightSender. Returns seconds.

        One rank of each pipeline stage writes what `tensors` yields; rank 0 merges the manifest in stage order. A version offered before
        under the same number is replaced. If any rank cannot write, every rank raises WeightTransferError naming that rank and why.
        """
        start = time.monotonic()
        self._is_first_rank = world.rank == 0
        tmp = weights_dir(self.run_dir) / f"{version}.tmp"
        _first_rank(world, lambda: _fresh_tmp(self.run_dir, version))
        writer = _StageWriter(tmp, world.pipeline_rank) if world.writes_stage else None
        for name, tensor in tensors:
            if writer is not None:
                writer.add(name, tensor)
        stages = _all_ranks(world, writer.close if writer is not None else lambda: None)
        rows = [row for _, stage in sorted(found for found in stages if found is not None) for row in stage]
        manifest = Manifest(version, tuple(map(TensorEntry.from_row, rows)))
        _first_rank(world, lambda: _offer(tmp, self.run_dir, manifest))
        return time.monotonic() - start

    def acked(self, version: int) -> bool:
        return acked(self.run_dir, version)

    def prune(self) -> list[int]:
        """On rank 0, delete versions below the newest acked one, except the `keep_last` newest; returns those deleted."""
        if not self._is_first_rank:
            return []
        present = versions(self.run_dir)
        newest_acked = max((version for version in present if self.acked(version)), default=0)
        old = [version for version in present[: -self.keep_last] if version < newest_acked]
        for version in old:
            _remove(version_dir(self.run_dir, version))
        return old


class _StageWriter:
    """Writes one pipeline stage's tensors into shards. An OS error is kept until close(), so that peers' collectives go on."""

    def __init__(self, directory: Path, stage: int) -> None:
        self.directory, self.stage = directory, stage
        self.entries: list[TensorEntry] = []
        self.shard: dict[str, torch.Tensor] = {}
        self.shards = self.bytes = 0
        self.error: OSError | None = None

    def add(self, name: str, tensor: "torch.Tensor") -> None:
        if self.error is not None:
            return
        # A copy: the exporter may reuse its gather buffer for the next tensor.
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        if self.shard and self.bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self.entries.append(entry_of(name, tensor, self._file()))
        self.shard[name] = tensor
        self.bytes += tensor.nbytes

    def close(self) -> tuple[int, list[dict[str, Any]]]:
        """(pipeline stage, its manifest rows as JSON). Raises the OSError of the first write that failed."""
        self._flush()
        if self.error is not None:
            raise self.error
        return self.stage, [asdict(entry) for entry in self.entries]

    def _file(self) -> str:
        return f"stage_{self.stage}_{self.shards}.safetensors"

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if self.shard and self.error is None:
            path = self.directory / self._file()
            try:
                save_file(self.shard, path)
                fsync_path(path)
            except SafetensorError as error:
                self.error = OSError(f"{path}: {error}")
            except OSError as error:
                self.error = error
        self.shard, self.bytes, self.shards = {}, 0, self.shards + 1


def _all_ranks(world: Ranks, act: Callable[[], Any]) -> list[Any]:
    """Run `act` on this rank; every rank's result (JSON), in rank order. If it fails on any, every rank raises WeightTransferError."""
    from megatron_rl.platform import gather_json

    result, problem = None, None
    try:
        result = act()
    except (OSError, WeightTransferError) as error:
        problem = f"rank {world.rank} cannot write the weights: {error}"
    outcomes = gather_json([result, problem], world.world_size)
    for _, found in outcomes:
        if found is not None:
            raise WeightTransferError(found)
    return [found for found, _ in outcomes]


def _first_rank(world: Ranks, act: Callable[[], object]) -> None:
    """Run `act` on rank 0; the others wait for it, and raise WeightTransferError if it failed."""
    _all_ranks(world, lambda: str(act()) if world.rank == 0 else None)


def _fresh_tmp(run_dir: Path, version: int) -> Path:
    tmp = weights_dir(run_dir) / f"{version}.tmp"
    if tmp.exists():
        shutil.rmtree(tmp)
    tmp.mkdir(parents=True)
    return tmp


def _offer(tmp: Path, run_dir: Path, manifest: Manifest) -> Path:
    if not manifest.tensors:
        raise WeightTransferError(f"version {manifest.version} has no tensors")
    write_atomic(tmp / MANIFEST, manifest.to_json().encode())
    target = version_dir(run_dir, manifest.version)
    if target.exists():
        _remove(target)
    os.rename(tmp, target)
    fsync_path(target.parent)
    return target


def _remove(directory: Path) -> None:
    """Delete a version so that no part of it is ever seen under its number."""
    trash = directory.with_name(f"{directory.name}.deleted")
    if trash.exists():
        shutil.rmtree(trash)
    os.rename(directory, trash)
    shutil.rmtree(trash)
