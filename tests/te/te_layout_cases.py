"""What runs in the process of tests/te/test_te_layouts.py: every rank of many layouts, on meta."""

import json
from pathlib import Path

import te_extension
from pretend_gpu import pretend_gpu
from te_models import rank_of, write

from megatron_rl import models, platform
from megatron_rl.config.trainer import ParallelConfig, TrainerConfig


def main(args: list[str]) -> dict:
    """args: folder for the models, file of [[model, layout], ...]. By model, layout number and rank: tensors and checkpoint keys."""
    directories = write(Path(args[0]))
    platform.install()
    te_extension.install()
    results: dict = {}
    for name, sizes in json.loads(Path(args[1]).read_text()):
        parallel = ParallelConfig(**sizes)
        ranks = results.setdefault(f"{name} {json.dumps(sizes)}", [])
        for rank in range(parallel.world_size):
            with rank_of(parallel, rank):
                ranks.append(_rank(directories[name], parallel, with_keys=rank in (0, parallel.world_size - 1)))
    return results


def _rank(directory: Path, parallel: ParallelConfig, with_keys: bool) -> dict:
    from megatron_rl.conversion.live import live_tensors

    with pretend_gpu("H100", meta=True):
        assert platform.layer_backend() == "transformer_engine"
        policy = models.build(directory, TrainerConfig(parallel=parallel), "float32")
        tensors = [
            {name: [list(tensor.shape), tensor.device.type] for name, tensor in live_tensors(policy, chunk).items()}
            for chunk in policy.chunks
        ]
        kinds = sorted({type(module).__name__ for chunk in policy.chunks for module in chunk.modules()})
        result = {"tensors": tensors, "kinds": kinds}
        if with_keys:
            result["keys"] = _checkpoint_keys(policy)
    if with_keys:
        result["torch keys"] = _checkpoint_keys(models.build(directory, TrainerConfig(parallel=parallel), "float32"))
    return result


def _checkpoint_keys(policy):
    """By chunk: [key, whole shape, offset] of each tensor that a distributed checkpoint holds of this rank."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    chunks = []
    for chunk in policy.chunks:
        shards = [value for value in _leaves(chunk.sharded_state_dict()) if isinstance(value, ShardedTensor)]
        chunks.append(sorted([shard.key, list(shard.global_shape), list(shard.global_offset)] for shard in shards))
    return chunks


def _leaves(tree: object) -> list:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _leaves(value)]
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    return _leaves(tree.build()) if isinstance(tree, ShardedTensorFactory) else [tree]
