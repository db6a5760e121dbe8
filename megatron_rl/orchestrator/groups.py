"""A group: all rollouts of one task. Complete, it is judged: trained with advantages, or dropped and counted."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.algorithms.advantages import Advantage
from megatron_rl.envs.protocol import Task
from megatron_rl.envs.sources import Source
from megatron_rl.orchestrator.tasks import Draw
from megatron_rl.traces.records import Rollout


@dataclass(eq=False)
class Group:
    """`size` rollouts of one task, opened when the engines held `version`; they arrive in any order."""

    draw: Draw
    source: Source
    task: Task
    version: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.source.id}-{self.draw.number}"

    @property
    def size(self) -> int:
        return self.source.group_size

    def add(self, index: int, rollout: Rollout) -> bool:
        """Whether the group is complete now. ValueError for an index out of range or seen before."""
        if not 0 <= index < self.size or index in self.rollouts:
            raise ValueError(f"group {self.id}: rollout {index} of {self.size} arrived twice or does not belong to it")
        self.rollouts[index] = rollout
        return len(self.rollouts) == self.size


Fate = Literal["train", "zero_advantage", "unusable", "stale"]


@dataclass(frozen=True, eq=False)
class Judged:
    """A group with its fate. `usable`: its rollouts that may be trained on, in order of index, with their advantages."""

    group: Group
    fate: Fate
    usable: list[tuple[Rollout, float]]

    @property
    def min_version(self) -> int:
        """The oldest weights that sampled any token of the usable rollouts."""
        return min(rollout.min_version for rollout, _ in self.usable)

    @property
    def finish_reasons(self) -> Counter[str]:
        return Counter(rollout.finish_reason for rollout in self.group.rollouts.values())


def judge(group: Group, advantage: Advantage, filter_zero_advantage: bool) -> Judged:
    """What becomes of a complete group.

    Rollouts that ended in error, timeout or overlong are left out (they shrink the group, they don't count as reward 0).
    "unusable": fewer than two are left. "zero_advantage": all raw rewards are equal, so there is nothing to learn.
    """
    usable = [rollout for _, rollout in sorted(group.rollouts.items()) if rollout.ok]
    if len(usable) < 2:
        return Judged(group, "unusable", [(rollout, 0.0) for rollout in usable])
    rewards = [rollout.reward for rollout in usable]
    advantages = advantage(rewards, [int(rollout.sampled.sum()) for rollout in usable])
    flat = filter_zero_advantage and len(set(rewards)) == 1
    return Judged(group, "zero_advantage" if flat else "train", list(zip(usable, advantages, strict=True)))
