"""Runs on every rank: what our experts and Megatron's, one MLP each, put into a checkpoint. Started by test_experts.py."""

from typing import Any

from megatron_rl import platform
from megatron_rl.config.trainer import ParallelConfig

LAYOUTS = {
    "ep2": {"expert_parallel": 2},
    "etp2": {"tensor_parallel": 2},
    "tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1},
    "dp2": {},
}


def main(_: list[str]) -> list[dict[str, Any]]:
    """By layout: {"ours": ..., "megatron": ...}, each the checkpoint's pieces and the attributes of every parameter."""
    platform.install()
    from megatron.core import parallel_state

    from megatron_rl.platform.world import split

    world, results = None, []
    for layout in LAYOUTS.values():
        parallel = ParallelConfig(**layout)
        if world is None:
            world = platform.initialize(parallel, seed=0, timeout_s=60, threads=1)
        else:
            parallel_state.destroy_model_parallel()
            world = split(parallel, seed=0, timeout_s=60)
        results.append(_compare(parallel))
    world.shutdown()
    return results


def _compare(parallel: ParallelConfig) -> dict[str, Any]:
    import torch.nn.functional as F
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from megatron_rl.models.layers.experts import TorchGroupedMLP

    config = TransformerConfig(
        num_layers=1,
        hidden_size=24,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_ffn_hidden_size=20,
        gated_linear_unit=True,
        add_bias_linear=False,
        activation_func=F.silu,
        tensor_model_parallel_size=parallel.tensor_parallel,
        expert_model_parallel_size=parallel.expert_parallel,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel or parallel.tensor_parallel,
        sequence_parallel=parallel.tensor_parallel > 1,
        **platform.transformer_defaults(),
    )
    groups, result = ProcessGroupCollection.use_mpu_process_groups(), {}
    for name, build in (("ours", TorchGroupedMLP), ("megatron", LocalSpecProvider().grouped_mlp_modules(True))):
        experts = build(4 // parallel.expert_parallel, config, pg_collection=groups)
        result[name] = {"pieces": _pieces(experts), "parameters": sorted(map(_attributes, experts.parameters()))}
    return result


def _pieces(experts: Any) -> list[list]:
    """Key, whole shape, place and replica of everything a checkpoint would hold, sorted."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    pieces = []
    for piece in experts.sharded_state_dict("decoder.layers.1.mlp.experts.", (), None).values():
        built = piece.build() if isinstance(piece, ShardedTensorFactory) else [piece]
        for part in built:
            shape = "object" if isinstance(part, ShardedObject) else list(part.local_shape)
            pieces.append([part.key, list(part.global_shape), list(part.global_offset), list(part.replica_id), shape])
    return sorted(pieces, key=str)


def _attributes(parameter: Any) -> list:
    return [list(parameter.shape), parameter.allreduce, parameter.tensor_model_parallel, parameter.partition_dim]
