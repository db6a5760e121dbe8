"""What runs on the ranks of tests/platform."""

import dataclasses
import warnings

import torch

from megatron_rl import platform
from megatron_rl.config.trainer import ParallelConfig


def coordinates(_):
    """This rank's World in three layouts of four ranks."""
    platform.install()
    layouts = [{"tensor_parallel": 2, "pipeline_parallel": 2}, {"context_parallel": 2}, {"tensor_parallel": 4, "data_parallel": 1}]
    found = []
    for sizes in layouts:
        if not found:
            world = platform.initialize(ParallelConfig(**sizes), seed=0, timeout_s=60, threads=1)
        else:
            from megatron.core import parallel_state

            from megatron_rl.platform.world import split

            parallel_state.destroy_model_parallel()
            world = split(ParallelConfig(**sizes), seed=0, timeout_s=60)
        found.append(dataclasses.asdict(world) | {"first": world.is_first_stage, "last": world.is_last_stage, "writes": world.writes_stage})
    world.shutdown()
    return found


def shim(_):
    """The CPU platform as Megatron sees it, after importing Megatron with warnings as errors."""
    platform.install()
    zeros = torch.zeros
    platform.install()
    warnings.simplefilter("error", UserWarning)
    platform.devices.install()
    for message in platform.cpu._EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    import megatron.core.models.hybrid.hybrid_model
    import megatron.core.optimizer  # noqa: F401

    with torch.device("meta"):
        meta = torch.arange(3)
    torch.cuda.manual_seed(5)
    drawn = torch.rand(2)
    state = torch.cuda.get_rng_state()
    after = torch.rand(2)
    torch.cuda.set_rng_state(state)
    return {
        "installed_once": torch.zeros is zeros,
        "current_device": str(torch.cuda.current_device()),
        "factory": str(torch.zeros(2, device="cuda").device),
        "pinned": str(torch.tensor([1], device="cuda", pin_memory=True).device),
        "meta": str(meta.device),
        "type": torch.zeros(1).type(),
        "converted": str(torch.zeros(1).type(torch.float64).dtype),
        "seed_is_cpu_seed": torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(5))),
        "state_restored": torch.equal(after, torch.rand(2)),
    }
