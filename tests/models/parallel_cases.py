"""Runs on every rank of one launch: many (model, layout) cases, each one forward and backward through Megatron's schedule.

Gradients go out through export_tensors (bitwise tested by itself), so they come with HF's names and shapes.
"""

import dataclasses
import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rl import conversion, models, platform
from megatron_rl.config.trainer import MoEConfig, ParallelConfig, TrainerConfig
from megatron_rl.models.layers.context_parallel import zigzag_indices
from megatron_rl.platform.world import split

LEARNING_RATE = 1e-3
"""Of two steps of plain SGD: the first moves the weights (of size 0.1) by up to 0.02."""


def main(args: list[str]) -> list[dict]:
    """args: file of cases [{"name", "model", "parallel", ...}], safetensors of the micro-batches, output folder."""
    cases, data, out = json.loads(Path(args[0]).read_text()), load_file(args[1]), Path(args[2])
    platform.install()
    world, results = None, []
    for case in cases:
        parallel = ParallelConfig(**case["parallel"])
        if world is None:
            world = platform.initialize(parallel, seed=0, timeout_s=60, threads=1)
        else:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            world = split(parallel, seed=0, timeout_s=60)
        results.append(_run(case, parallel, world, data, out))
        dist.barrier()
    world.shutdown()
    return results


def _run(case: dict, parallel: ParallelConfig, world: platform.World, data: dict, out: Path) -> dict:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    dtype = case.get("dtype", "float32")
    moe = MoEConfig(train_router=True, token_dispatcher=case.get("token_dispatcher", "alltoall"))
    recompute, head_chunk_tokens = case.get("recompute", "none"), case.get("chunk", 5)
    trainer = TrainerConfig(parallel=parallel, moe=moe, recompute=recompute, head_chunk_tokens=head_chunk_tokens)
    policy = models.build(case["model"], trainer, dtype)
    conversion.load_hf(policy, case["model"])
    exported = {name: tensor.clone() for name, tensor in conversion.export_tensors(policy)}
    _save(exported, out / f"{case['name']}.weights", world)
    if case.get("save_hf"):
        conversion.save_hf(policy, out / f"{case['name']}.hf", case["model"])

    policy.config.finalize_model_grads_func = lambda chunks, _, **kw: finalize_model_grads(chunks, None, **kw)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunks = [DistributedDataParallel(policy.config, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(policy.chunks)]
    micro_batches = [
        _micro_batch(data, number, world) for number in range(int(data["count"])) if number % world.data_size == world.data_rank
    ]
    logprobs, entropies = [], []

    def forward(iterator, model):
        batch = next(iterator)
        output = model(batch["ids"], batch["positions"], batch["labels"], batch["temperatures"], batch["packed"])

        def loss(output):
            logprobs.append(output[0].detach())
            entropies.append(output[1].detach())
            return -(output[0] * batch["weights"]).sum(), torch.zeros((), dtype=torch.int), {}

        return output, loss

    trained = [parameter for chunk in policy.chunks for parameter in chunk.parameters() if parameter.requires_grad]
    for step in (1, 2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        if step == 1:
            weights = [parameter.data for parameter in trained]
            for parameter in trained:
                parameter.data = parameter.main_grad.clone()
            _save(_exported_trained(policy), out / f"{case['name']}.grads", world)
            for parameter, weight in zip(trained, weights, strict=True):
                parameter.data = weight
            outputs = [torch.cat(stream).tolist() for stream in (logprobs, entropies)] if logprobs else []
        with torch.no_grad():
            for parameter in trained:
                parameter -= (LEARNING_RATE * parameter.main_grad).to(parameter.dtype)
    _save(_exported_trained(policy), out / f"{case['name']}.stepped", world)
    place = dataclasses.asdict(world) | {"first": world.is_first_stage, "last": world.is_last_stage, "writes": world.writes_stage}
    return {"stage_outputs": bool(outputs), "world": place, **dict(zip(("logprobs", "entropy"), outputs, strict=False))}


def _exported_trained(policy) -> dict[str, torch.Tensor]:
    frozen = ("e_score_correction_bias", ".indexer.")
    return {name: tensor.clone() for name, tensor in conversion.export_tensors(policy) if not any(part in name for part in frozen)}


def _micro_batch(data: dict, number: int, world: platform.World) -> dict:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = data[f"{number}.cu"]
    share = zigzag_indices(cu, world.context_rank, world.context_size)
    streams = {name: data[f"{number}.{name}"][share][None] for name in ("ids", "positions", "labels", "temperatures")}
    longest = int(cu.diff().max())
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)
    return {**streams, "weights": data[f"{number}.weights"][share], "packed": packed}


def _save(tensors: dict[str, torch.Tensor], path: Path, world: platform.World) -> None:
    """One file per pipeline stage; the parent merges them."""
    assert bool(tensors) == world.writes_stage
    if world.writes_stage:
        path.mkdir(exist_ok=True)
        for_stage = path / f"stage_{world.pipeline_rank}.safetensors"
        save_file(tensors, for_stage)
