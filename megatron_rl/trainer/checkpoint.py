"""Sharded checkpoints: checkpoints/step_<n>/{trainer/, orchestrator/state.msgpack, COMPLETE}.

Model, FP32 masters and optimizer moments go through megatron.core.dist_checkpointing in its fully reshardable layout,
so another tensor, pipeline or data parallel size can load them. COMPLETE is renamed into place last: a directory
without it does not count.
"""

import os
import shutil
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from megatron_rl import platform
from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.metadata import read_metadata
from megatron_rl.trainer.optimizer import Optimizer
from megatron_rl.transports.atomic import fsync_path, write_atomic

LAYOUT = 1
"""Version of what a checkpoint holds; another one is refused."""


def save(run_dir: Path, step: int, optimizer: Optimizer, orchestrator_state: bytes) -> None:
    """Write the state after `step` on all ranks (collective). It does not count before `complete`."""
    final = run_dir / "checkpoints" / f"step_{step}"
    partial = final.with_name(final.name + ".partial")
    if dist.get_rank() == 0:
        for leftover in (partial, final):  # `final` without COMPLETE is a save that a kill cut short
            shutil.rmtree(leftover, ignore_errors=True)
        (partial / "trainer").mkdir(parents=True)
    dist.barrier()
    state = {"layout": LAYOUT, "step": step, "trains_routers": optimizer.trains_routers, **_sharded_state(optimizer, loading=False)}
    dist_checkpointing.save(state, str(partial / "trainer"), verify_integrity=True)
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / "orchestrator").mkdir()
        write_atomic(partial / "orchestrator" / "state.msgpack", orchestrator_state)
        os.rename(partial, final)
        fsync_path(final.parent)


def complete(run_dir: Path, step: int, keep_last: int) -> None:
    """Let the checkpoint of `step` count, once all else of the step is on disk, and drop all but the `keep_last` newest (on rank 0)."""
    write_atomic(run_dir / "checkpoints" / f"step_{step}" / "COMPLETE", f"{step}\n".encode())
    for old in complete_steps(run_dir)[:-keep_last]:
        directory = run_dir / "checkpoints" / f"step_{old}"
        (directory / "COMPLETE").unlink()  # first: half deleted, it must not count
        shutil.rmtree(directory)


def due(step: int, last: int, interval: int | None) -> bool:
    """Whether a checkpoint follows `step`: every `interval` steps and after the last one."""
    return step == last or (interval is not None and step % interval == 0)


def load(checkpoint: Path, optimizer: Optimizer) -> int:
    """Load model and optimizer state in place at any layout (collective). Returns the step.

    Raises ConfigError where .metadata is damaged or not a checkpoint's, and where routers were frozen and are now trained or the other
    way round."""
    read_metadata(checkpoint / "trainer")  # a pickle: refused unless it holds a checkpoint's own classes, before Megatron reads it
    known = dist_checkpointing.load_common_state_dict(str(checkpoint / "trainer"))
    if known["layout"] != LAYOUT:
        raise ValueError(f"{checkpoint}: checkpoint layout {known['layout']}, this version reads {LAYOUT}")
    if (trained := known.get("trains_routers", False)) != optimizer.trains_routers:
        now, then, were = str(optimizer.trains_routers).lower(), str(trained).lower(), "trained" if trained else "frozen"
        raise ConfigError(
            f"trainer.moe.train_router = {now}: the routers of {checkpoint} were {were}; "
            f"resume with train_router = {then}, or start a new run from its HF export"
        )
    state = dist_checkpointing.load(
        {"step": 0, **_sharded_state(optimizer, loading=True)}, str(checkpoint / "trainer"), verify_integrity=True
    )
    for key, chunk in zip(_model_keys(optimizer), optimizer.chunks, strict=True):
        chunk.module.load_state_dict(state[key])
    optimizer.megatron.load_state_dict(state["optimizer"])
    return int(state["step"])


def complete_steps(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    return sorted(int(marker.parent.name.removeprefix("step_")) for marker in run_dir.glob("checkpoints/step_*/COMPLETE"))


def _model_keys(optimizer: Optimizer) -> list[str]:
    return ["model"] if len(optimizer.chunks) == 1 else [f"model{i}" for i in range(len(optimizer.chunks))]


def _sharded_state(optimizer: Optimizer, loading: bool) -> dict:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    models = {
        key: chunk.module.sharded_state_dict(metadata=metadata) for key, chunk in zip(_model_keys(optimizer), optimizer.chunks, strict=True)
    }
    whole = models if len(models) > 1 else models["model"]
    with platform.unpadded_offsets(optimizer.megatron):
        return {**models, "optimizer": optimizer.megatron.sharded_state_dict(whole, is_loading=loading, metadata=metadata)}
