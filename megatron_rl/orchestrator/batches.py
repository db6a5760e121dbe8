"""Judged groups -> batches of exactly batch_size rollouts: how many more to open, which are too stale, which ship."""

from collections import Counter
from dataclasses import dataclass, field, replace

from megatron_rl.config.base import ConfigError
from megatron_rl.config.orchestrator import OrchestratorConfig
from megatron_rl.orchestrator.groups import Judged
from megatron_rl.orchestrator.staleness import newest_batch, too_stale
from megatron_rl.traces.records import Rollout


@dataclass
class Selection:
    """A batch. `surplus`: usable rollouts of the last group that no longer fit; they are dropped and counted."""

    step: int
    groups: list[Judged]
    surplus: list[Rollout]
    dropped: list[Judged]
    """Groups dropped since the batch before, each with its fate."""

    @property
    def rollouts(self) -> list[tuple[Rollout, float]]:
        """What ships, with advantages."""
        return [pair for judged in self.groups for pair in judged.usable]


@dataclass
class BatchBuilder:
    """`last_step`: nothing is generated for later batches. `lag`: the one in force (0 in deterministic runs)."""

    config: OrchestratorConfig
    lag: int
    last_step: int
    in_order: bool = False
    """Ship groups in the order in which they were drawn; else first ready, first shipped."""
    ready: list[Judged] = field(default_factory=list)
    dropped: list[Judged] = field(default_factory=list)

    def wanted(self, step: int, version: int, open_rollouts: int) -> int:
        """Rollouts that may still be opened while batch `step` is being made and the engines hold `version`."""
        lag = min(self.lag, self.config.max_off_policy_steps)
        batches = min(newest_batch(version, lag), self.last_step) - (step - 1)
        return batches * self.config.batch_size - open_rollouts - sum(len(judged.usable) for judged in self.ready)

    def add(self, judged: Judged, step: int) -> None:
        """A group's fate is known. ConfigError once max_filtered_groups were filtered for this batch."""
        if judged.fate == "train":
            self.ready.append(judged)
            return
        self.dropped.append(judged)
        filtered = [j for j in self.dropped if j.fate != "stale"]
        if len(filtered) >= self.config.max_filtered_groups:
            raise ConfigError(self._hopeless(filtered, step))

    def expire(self, step: int) -> list[Judged]:
        """Drop the ready groups that are too stale for batch `step`; returns them."""
        limit = self.config.max_off_policy_steps
        stale = [replace(judged, fate="stale") for judged in self.ready if too_stale(step, judged.min_version, limit)]
        self.ready = [judged for judged in self.ready if not too_stale(step, judged.min_version, limit)]
        self.dropped += stale
        return stale

    def take(self, step: int) -> Selection | None:
        """The batch of `step`, or None while too few rollouts are ready. Call `expire` before."""
        if self.in_order:
            self.ready.sort(key=lambda judged: judged.group.draw.number)
        room, groups, surplus = self.config.batch_size, [], []
        for judged in self.ready:
            fits, over = judged.usable[:room], judged.usable[room:]
            groups.append(replace(judged, usable=fits))
            surplus += [rollout for rollout, _ in over]
            room -= len(fits)
            if room == 0:
                break
        if room > 0:
            return None
        self.ready = self.ready[len(groups) :]
        selection = Selection(step, groups, surplus, self.dropped)
        self.dropped = []
        return selection

    def _hopeless(self, filtered: list[Judged], step: int) -> str:
        fates = Counter(judged.fate for judged in filtered)
        ends = Counter[str]()
        for judged in filtered:
            ends.update(judged.finish_reasons)
        rewards = [rollout.reward for judged in filtered for rollout, _ in judged.usable]
        mean = f"mean reward {sum(rewards) / len(rewards):.3g}" if rewards else "no reward"
        return (
            f"batch {step}: {len(filtered)} groups were filtered (zero_advantage {fates['zero_advantage']}, unusable {fates['unusable']}; "
            f"{mean}; rollouts ended: {', '.join(f'{name} {count}' for name, count in sorted(ends.items()))}): "
            f"the tasks are solved, or too hard; change [train], or raise orchestrator.max_filtered_groups"
        )
