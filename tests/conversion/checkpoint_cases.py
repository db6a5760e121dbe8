"""Runs on every rank of one launch of test_convert_ranks.py: many cases, each loads or saves a Megatron checkpoint with live models."""

import json
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rl import conversion, models, platform
from megatron_rl.config.trainer import OptimConfig, ParallelConfig, SchedulerConfig, TrainerConfig
from megatron_rl.conversion.live_checkpoint import load_megatron
from megatron_rl.platform.world import split


def main(args: list[str]) -> None:
    """args: file of cases [{"name", "kind", "parallel", "hf", "megatron"}], output folder."""
    cases, out = json.loads(Path(args[0]).read_text()), Path(args[1])
    platform.install()
    world = None
    for case in cases:
        parallel = ParallelConfig(**case["parallel"])
        if world is None:
            world = platform.initialize(parallel, seed=0, timeout_s=120, threads=1)
        else:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            world = split(parallel, seed=0, timeout_s=120)
        policy = models.build(case["hf"], TrainerConfig(parallel=parallel), "float32")
        KINDS[case["kind"]](policy, case, out / case["name"])
        if case["kind"] != "save":
            exported = {name: tensor.clone() for name, tensor in conversion.export_tensors(policy)}
            if world.writes_stage:
                (out / case["name"]).mkdir(exist_ok=True)
                save_file(exported, out / case["name"] / f"stage_{world.pipeline_rank}.safetensors")
        dist.barrier()
    world.shutdown()


def load(policy, case, out):
    """A converted directory into a live model."""
    load_megatron(policy, Path(case["megatron"]))


def save(policy, case, out):
    """A training checkpoint of the HF weights, after a step that changes nothing: <out>/checkpoints/step_1."""
    from megatron_rl.trainer import checkpoint
    from megatron_rl.trainer.optimizer import Optimizer

    conversion.load_hf(policy, case["hf"])
    optimizer = Optimizer(policy, OptimConfig(lr=1e-3), SchedulerConfig(), 10)
    optimizer.zero_grad()
    optimizer.step(1, optimizer.gradient_norm())
    checkpoint.save(out, 1, optimizer, b"orchestrator")


def resume(policy, case, out):
    """A training checkpoint, optimizer state and all, into a live model and optimizer."""
    from megatron_rl.trainer import checkpoint
    from megatron_rl.trainer.optimizer import Optimizer

    optimizer = Optimizer(policy, OptimConfig(lr=1e-3), SchedulerConfig(), 10)
    assert checkpoint.load(Path(case["megatron"]), optimizer) == 1


KINDS = {"load": load, "save": save, "resume": resume}
