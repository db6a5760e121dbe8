"""A live policy from a Megatron directory that hf-to-megatron or reshard wrote."""

from pathlib import Path

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl.conversion.megatron_model import read_marker
from megatron_rl.conversion.metadata import read_metadata
from megatron_rl.models.policy import Policy


def load_megatron(policy: Policy, directory: Path) -> None:
    """Fill the policy's weights, at any layout (collective). float32 and bfloat16 checkpoints fit either dtype.

    Raises:
        ConfigError: no such directory, a newer layout, or metadata that no checkpoint has.
    """
    read_marker(directory)
    read_metadata(directory)  # refuses what is no checkpoint before Megatron unpickles it
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), "singleton_local_shards": False}
    state = {}
    for number, chunk in enumerate(policy.chunks):
        tensors = chunk.sharded_state_dict(metadata=metadata)
        # Objects are TransformerEngine's scaling state: a converted checkpoint has none, and layers without it start afresh.
        state[f"model{number}"] = {name: value for name, value in tensors.items() if not isinstance(value, ShardedObject)}
    loaded = dist_checkpointing.load(state, str(directory))
    for number, chunk in enumerate(policy.chunks):
        missing, unexpected = chunk.load_state_dict(loaded[f"model{number}"], strict=False)
        if lost := [name for name in (*missing, *unexpected) if "_extra_state" not in name]:
            raise AssertionError(f"{directory}: not loaded: {lost}")
