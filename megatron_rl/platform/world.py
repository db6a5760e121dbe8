"""The process groups of a training job, and this rank's place in them."""

import json
import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.platform.devices import communication_backend, device


@dataclass(frozen=True)
class World:
    """This rank's coordinates. `data_*` counts model replicas: the ranks of one tensor x pipeline x context group share a data rank."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    context_rank: int
    context_size: int

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def writes_stage(self) -> bool:
        """One rank per pipeline stage, the one that holds that stage's exported weights."""
        return self.tensor_rank == self.data_rank == self.context_rank == 0

    def __str__(self) -> str:
        return (
            f"rank {self.rank}/{self.world_size} (data {self.data_rank}, context {self.context_rank}, "
            f"pipeline {self.pipeline_rank}, tensor {self.tensor_rank})"
        )

    def shutdown(self) -> None:
        """Leave the process groups."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def initialize(parallel: ParallelConfig, seed: int, timeout_s: float, threads: int | None = None) -> World:
    """Join the job that torchrun (or our launcher) started and build Megatron's process groups.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (and LOCAL_WORLD_SIZE for the default of `threads`); without
    them this process is a job of one rank. Call `install()` first.

    Raises:
        ConfigError: the number of ranks does not fit the parallel sizes.
    """
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    _check_ranks(parallel, world_size)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_ranks))
    if device().type == "cuda":
        torch.cuda.set_device(device())
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(communication_backend(), timeout=timeout)
    else:
        dist.init_process_group(communication_backend(), timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    return split(parallel, seed, timeout_s)


def split(parallel: ParallelConfig, seed: int, timeout_s: float) -> World:
    """Megatron's process groups over the ranks that already met, and random states from `seed`: one per pipeline stage for fresh weights
    and host code, one more per tensor rank for dropout."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_rl.platform import adam

    _check_ranks(parallel, dist.get_world_size())
    adam.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_parallel if parallel.virtual_pipeline_parallel > 1 else None,
        context_parallel_size=parallel.context_parallel,
        expert_model_parallel_size=parallel.expert_parallel,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel,
        distributed_timeout_minutes=timeout_s / 60,
    )
    world = World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel.tensor_parallel,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel.pipeline_parallel,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel.context_parallel,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    stage_seed = seed + 100 * world.pipeline_rank
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    return world


def gather_json(value: Any, ranks: int) -> list[Any]:
    """Every rank's `value` (JSON), in rank order, on each of `ranks` ranks: collective over the job. Bytes travel, never pickles."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    if ranks == 1:
        return [json.loads(bytes(data.numpy()))]
    sizes = torch.empty(ranks, dtype=torch.int64, device=device())
    dist.all_gather_into_tensor(sizes, torch.tensor([len(data)], device=device()))
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device())
    mine[: len(data)] = data
    gathered = mine.new_empty(ranks * len(mine))
    dist.all_gather_into_tensor(gathered, mine)
    rows = gathered.view(ranks, -1).cpu().numpy()
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes.tolist(), strict=True)]


def _check_ranks(parallel: ParallelConfig, world_size: int) -> None:
    if problem := parallel.problem_with(world_size):
        raise ConfigError(f"[trainer.parallel] {problem}")
