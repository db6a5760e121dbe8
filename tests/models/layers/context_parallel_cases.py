"""Runs on every context rank of one launch: the core attention over ranks, forward and backward, case by case."""

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl import platform
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.models.layers.context_parallel import zigzag_indices

KINDS = ("all_gather", "p2p", "a2a")


def main(args: list[str]) -> dict[str, int]:
    """args: number of ranks, folder of the cases' safetensors, output folder. Returns the bytes of each call's largest tensor."""
    size, cases, out = int(args[0]), Path(args[1]), Path(args[2])
    platform.install()
    world = platform.initialize(ParallelConfig(context_parallel=size), seed=0, timeout_s=60, threads=1)
    largest = {}
    for path in sorted(cases.iterdir()):
        data = load_file(path)
        share = zigzag_indices(data["offsets"], world.context_rank, size)
        for kind in KINDS:
            inputs = {name: data[name][share].clone().requires_grad_() for name in ("query", "key", "value")}
            with _LargestTensor() as seen:
                output = _attend(kind, inputs, data["offsets"], world)
                output.backward(data["grad"][share].view(output.shape))
            largest[f"{path.stem}.{kind}"] = seen.bytes
            results = {"output": output.detach(), **{name: tensor.grad for name, tensor in inputs.items()}}
            save_file(
                {name: tensor.contiguous() for name, tensor in results.items()},
                out / f"{path.stem}.{kind}.{world.context_rank}.safetensors",
            )
    world.shutdown()
    return largest


def _attend(kind: str, inputs: dict[str, torch.Tensor], offsets: torch.Tensor, world: platform.World) -> torch.Tensor:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_rl.models.layers.attention import TorchAttention

    packed = inputs["query"].dim() == 3
    attention = TorchAttention(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, attention_dropout=0.0),
        1,
        AttnMaskType.causal,
        "self",
        cp_comm_type=kind,
        pg_collection=SimpleNamespace(cp=parallel_state.get_context_parallel_group()),
    )
    longest = int(offsets.diff().max())
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest)
    return attention(*inputs.values(), None, packed_seq_params=params if packed else None)


class _LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that any operation made, backward included."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        self.bytes = max([self.bytes, *(tensor.untyped_storage().nbytes() for tensor in made)])
        return result
