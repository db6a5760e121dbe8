"""The orchestrator's numbers of one batch."""

import statistics
from collections import Counter

from megatron_rl.orchestrator.batches import Selection
from megatron_rl.orchestrator.staleness import staleness
from megatron_rl.traces.records import Rollout


def batch_metrics(selection: Selection) -> dict[str, float]:
    """Numbers of a batch, by their keys in metrics.jsonl.

    Rewards are over all finished rollouts (stop or length) of the groups considered for the batch: shipped, filtered,
    stale; reward/std is the population's. Staleness is over the rollouts shipped. Counts of what was dropped are of the
    groups considered.
    """
    considered = [rollout for judged in (*selection.groups, *selection.dropped) for rollout in judged.group.rollouts.values()]
    finished = [rollout for rollout in considered if rollout.ok]
    shipped = [rollout for rollout, _ in selection.rollouts]
    ages = [staleness(selection.step, rollout.min_version) for rollout in shipped]
    reasons = Counter(rollout.finish_reason for rollout in considered)
    dropped = Counter(judged.fate for judged in selection.dropped)
    return {
        "reward/mean": statistics.fmean(rollout.reward for rollout in finished),
        "reward/std": statistics.pstdev(rollout.reward for rollout in finished),
        **{f"reward/{source}/mean": mean for source, mean in _by_source(finished).items()},
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": max(ages),
        "groups/trained": len(selection.groups),
        "groups/filtered": dropped["zero_advantage"],
        "groups/unusable": dropped["unusable"],
        "groups/stale": dropped["stale"],
        "rollouts/trained": len(shipped),
        "rollouts/surplus": len(selection.surplus),
        **{f"rollouts/{reason}": reasons[reason] for reason in ("length", "error", "timeout", "overlong")},
        "tokens/sampled": sum(int(rollout.sampled.sum()) for rollout in shipped),
        "time/rollout": statistics.fmean(rollout.timings["total"] for rollout in finished),
    }


def _by_source(rollouts: list[Rollout]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.source, []).append(rollout.reward)
    return {source: statistics.fmean(values) for source, values in sorted(rewards.items())}
