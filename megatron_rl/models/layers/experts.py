"""A rank's share of a MoE layer's experts, with Megatron's interface, names and checkpoint keys, computed by one kernel."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor

from megatron_rl import platform
from megatron_rl.kernels.grouped_mlp.reference import grouped_mlp


class TorchGroupedMLP(MegatronModule):
    """Experts without biases whose activation is SwiGLU. Under expert tensor parallel each rank computes with its share of the inner
    width, and the token dispatcher adds the shares up."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: ProcessGroupCollection, name: str | None = None
    ) -> None:
        super().__init__(config)
        inner = divide(config.moe_ffn_hidden_size, pg_collection.expt_tp.size())
        self.linear_fc1 = ExpertLinears(num_local_experts, 2 * inner, config.hidden_size, 0, config, pg_collection)
        self.linear_fc2 = ExpertLinears(num_local_experts, config.hidden_size, inner, 1, config, pg_collection)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """tokens [n, h] sorted by local expert, tokens_per_expert [experts] int64, probs [n] float32 -> ([n, h], no bias)."""
        return grouped_mlp(tokens, probs, tokens_per_expert.tolist(), self.linear_fc1.weights(), self.linear_fc2.weights()), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The keys of Megatron's other experts: `experts.linear_fc1.weight` with an axis of experts first, gate and up cut one by one."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        fc1 = self.linear_fc1.sharded_state_dict(f"{prefix}linear_fc1.", sharded_offsets, metadata)
        for name, tensor in fc1.items():
            if "_extra_state" not in name:
                offsets = (*sharded_offsets, self.linear_fc1.expert_offset(int(name.rpartition("weight")[2]), sharded_offsets))
                tp, dp = self.linear_fc1.groups.expt_tp, metadata["dp_cp_group"]
                fc1[name] = apply_swiglu_sharded_factory(tensor, offsets, tp_group=tp, dp_group=dp)
        return {**fc1, **self.linear_fc2.sharded_state_dict(f"{prefix}linear_fc2.", sharded_offsets, metadata)}


class ExpertLinears(torch.nn.Module):
    """One weight per local expert, `weight0`, `weight1`, ... [out, in], split over expert tensor parallel along `split_axis`."""

    def __init__(
        self, experts: int, out: int, width: int, split_axis: int, config: TransformerConfig, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.experts, self.split_axis, self.groups = experts, split_axis, groups
        # Whether other ranks than those of dense parameters share the gradient: Megatron's rule for parameters of experts.
        same_ranks = config.expert_model_parallel_size == 1 and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        for expert in range(experts):
            weight = torch.nn.Parameter(torch.empty(out, width, dtype=config.params_dtype, device=platform.device()))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=split_axis, stride=1)
            weight.allreduce = same_ranks
            if config.perform_initialization:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    config.init_method(weight)
            self.register_parameter(f"weight{expert}", weight)
        self._register_load_state_dict_pre_hook(_drop_extra_states)

    def weights(self) -> list[Tensor]:
        """By local expert."""
        return [getattr(self, f"weight{expert}") for expert in range(self.experts)]

    def expert_offset(self, expert: int, sharded_offsets: tuple) -> tuple[int, int, int]:
        """Axis, place and size of the checkpoint's axis of experts."""
        ep = self.groups.ep
        return len(sharded_offsets), ep.rank() * self.experts + expert, ep.size() * self.experts

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple, metadata: dict) -> dict:
        """Tensors by live name, each with the key it has in a checkpoint. The empty `_extra_state` of every expert is there for
        TransformerEngine's layers, which ask for it."""
        base, linear = prefix.rstrip(".").rsplit(".", 1)
        sharded = {}
        for expert, weight in enumerate(self.weights()):
            tensors = make_sharded_tensors_for_checkpoint(
                {"weight": weight, "_extra_state": None},
                f"{base}.experts.{linear}.",
                {"weight": self.split_axis},
                (*sharded_offsets, self.expert_offset(expert, sharded_offsets)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for key, tensor in tensors.items():
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
                sharded[f"{prefix}{key.rpartition('.')[2]}{expert}"] = tensor
        return sharded


def _drop_extra_states(state: dict, prefix: str, *_: object) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}_extra_state")]:
        del state[name]
