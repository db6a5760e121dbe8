"""Families on TransformerEngine layers, as any rank of any layout, in one process: the ranks are only counted, never started."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import tiny_models
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.config.trainer import ParallelConfig

WRITERS = tiny_models.FAMILIES | {"qwen3_tied": tiny_models.VARIANTS["qwen3_tied"]}


def write(folder: Path) -> dict[str, Path]:
    """The HF directory of every model."""
    for name, writer in WRITERS.items():
        writer(folder / name)
    return {name: folder / name for name in WRITERS}


@contextlib.contextmanager
def rank_of(parallel: ParallelConfig, rank: int = 0) -> Iterator[None]:
    """This process is `rank` of a job whose collectives do nothing."""
    from megatron.core import parallel_state

    from megatron_rl.platform.world import split

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
    initialize = functools.partial(parallel_state.initialize_model_parallel, create_gloo_process_groups=False)
    try:
        with mock.patch.object(parallel_state, "initialize_model_parallel", initialize):
            split(parallel, seed=0, timeout_s=60)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
