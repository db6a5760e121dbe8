"""The orchestrator: batch size, staleness, concurrency."""

from pydantic import Field

from megatron_rl.config.base import Table


class OrchestratorConfig(Table):
    """[orchestrator]"""

    batch_size: int = Field(default=128, ge=1)
    """Rollouts per optimizer step, constant: filtered groups are replaced. A multiple of every source's group_size."""
    lag: int = Field(default=1, ge=0)
    """Batch n may be generated while the weights are at version n - 1 - lag: 0 is synchronous, 1 overlaps one step."""
    max_off_policy_steps: int = Field(default=8, ge=0)
    """A group whose oldest token is staler than this, in steps, when its batch is made is dropped and counted."""
    max_inflight: int = Field(default=128, ge=1)
    """Rollouts in flight at a time."""
    filter_zero_advantage: bool = True
    """Drop groups whose rewards are all equal, and generate others in their place."""
    max_filtered_groups: int = Field(default=512, ge=1)
    """So many groups filtered for one batch ends the run: the task is solved, or too hard to ever be solved."""
    max_consecutive_errors: int = Field(default=32, ge=1)
    """So many rollouts in a row that end in an error or a timeout end the run."""
    batch_transport: str = Field(default="zmq", pattern="^(zmq|filesystem)$")
    """How trainer ranks pull a step's batch."""
    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """How long a trainer rank waits for a batch before it names the orchestrator as hung."""
