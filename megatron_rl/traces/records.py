"""The rollout record: what was sampled, by which weights, and what it was worth."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

FINISH_REASONS = ("stop", "length", "timeout", "error", "overlong")


@dataclass
class Rollout:
    """One run of one task. token_ids, sampled, logprobs: shape [tokens]; logprobs are 0 where sampled is False."""

    rollout_id: str
    source: str
    task_id: str
    group_id: str
    token_ids: np.ndarray  # int32: every token of the dialogue, exactly as the engine saw or sampled it
    sampled: np.ndarray  # bool: tokens the policy sampled
    logprobs: np.ndarray  # float32, processed: at the sampling temperature
    versions: list[tuple[int, int, int]]  # (policy version, start, end) over token_ids, sampled spans only
    temperature: float
    reward: float
    finish_reason: str  # one of FINISH_REASONS
    branch: int = 0
    reward_parts: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    error: str = ""
    timings: dict[str, float] = field(default_factory=dict)  # seconds

    @property
    def ok(self) -> bool:
        """Whether it may be trained on."""
        return self.finish_reason in ("stop", "length") and bool(self.sampled.any())

    @property
    def min_version(self) -> int:
        """Oldest weights that sampled any of its tokens."""
        return min(version for version, _, _ in self.versions)

    def to_json(self) -> dict[str, Any]:
        """JSON values; floats rounded to 6 digits (a trace is for reading, the batch keeps the exact ones)."""
        row = dict(vars(self))
        row.update(
            token_ids=self.token_ids.tolist(),
            sampled=self.sampled.astype(int).tolist(),
            logprobs=[round(x, 6) for x in self.logprobs.tolist()],
        )
        return row
