"""Evaluates the policy on [[eval.source]]: greedy exact match, and pass@k from samples."""

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import EvalRunConfig
from megatron_rl.envs.rendering import Renderer
from megatron_rl.envs.sources import Source, load_sources
from megatron_rl.evals.pass_at_k import pass_at_k, powers_of_two
from megatron_rl.evals.rollouts import Pool, derive_seed, run_rollout
from megatron_rl.traces.records import Rollout
from megatron_rl.traces.stream import TraceStream
from megatron_rl.transports.atomic import append_line


async def evaluate(
    sources: Sequence[Source],
    pool: Pool,
    renderer: Renderer,
    *,
    context: int,
    seed: int,
    max_inflight: int,
    step: int,
    trace: TraceStream | None = None,
) -> dict[str, float]:
    """One eval line without its step.

    For each source: `eval/<id>/exact_match`, the share of tasks whose greedy answer has reward 1.0 exactly, and
    `eval/<id>/reward`, its mean. With a positive temperature also `eval/<id>/pass@<k>` for k = 1, 2, 4, ... up to
    group_size, from group_size samples per task. A rollout that ends in timeout, error or overlong is wrong, and counted
    under that name if there is any. `time/eval`: seconds. Raises EngineFailure.
    """
    check(sources)
    started = time.perf_counter()
    slots = asyncio.Semaphore(max_inflight)

    async def run(source: Source, index: int, sample: int | None) -> Rollout:
        mode = "greedy" if sample is None else "sampled"
        temperature = 0.0 if sample is None else source.sampling.temperature
        async with slots:
            rollout = await run_rollout(
                pool,
                renderer,
                context,
                source,
                source.task(index),
                group_id=f"eval-{step}-{source.id}-{index}-{mode}",
                index=sample or 0,
                temperature=temperature,
                seed=derive_seed(seed, "eval", source.id, index, sample),
                cache_salt="",
            )
        if trace is not None:
            trace.append(rollout, kind="eval", step=step, fate=mode)
        return rollout

    try:
        async with asyncio.TaskGroup() as group:
            runs = {
                source.id: [
                    (group.create_task(run(source, i, None)), [group.create_task(run(source, i, s)) for s in range(samples(source))])
                    for i in source.indices
                ]
                for source in sources
            }
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    metrics: dict[str, float] = {}
    for source in sources:
        done = [(greedy.result(), [s.result() for s in sampled]) for greedy, sampled in runs[source.id]]
        metrics.update({f"eval/{source.id}/{name}": value for name, value in summarize(done).items()})
    metrics["time/eval"] = time.perf_counter() - started
    return metrics


def summarize(tasks: Sequence[tuple[Rollout, Sequence[Rollout]]]) -> dict[str, float]:
    """(greedy rollout, sampled rollouts) of each task -> the source's numbers."""
    greedy = [rollout for rollout, _ in tasks]
    numbers: dict[str, float] = {
        "exact_match": statistics.fmean(map(is_correct, greedy)),
        "reward": statistics.fmean(rollout.reward for rollout in greedy),
    }
    for k in powers_of_two(len(tasks[0][1])):
        numbers[f"pass@{k}"] = statistics.fmean(pass_at_k(len(sampled), sum(map(is_correct, sampled)), k) for _, sampled in tasks)
    reasons = Counter(rollout.finish_reason for rollout, sampled in tasks for rollout in (rollout, *sampled))
    return numbers | {reason: reasons[reason] for reason in ("timeout", "error", "overlong") if reasons[reason]}


def is_correct(rollout: Rollout) -> bool:
    """Reward 1.0 exactly: partial credit is not a pass."""
    return rollout.ok and rollout.reward == 1.0


def samples(source: Source) -> int:
    """Sampled rollouts per task, beside the greedy one."""
    return source.group_size if source.sampling.temperature > 0 else 0


def check(sources: Sequence[Source]) -> None:
    """ConfigError for a source that asks for several samples at temperature 0."""
    for source in sources:
        if source.group_size > 1 and source.sampling.temperature == 0:
            raise ConfigError(
                f"eval source {source.id!r}: group_size = {source.group_size} at temperature 0 gives the same answer each time; "
                f"set sampling.temperature above 0 for pass@k"
            )


def record(run_dir: Path, step: int, metrics: dict[str, float]) -> None:
    """Append the eval line of `step` to the run's metrics.jsonl."""
    append_line(run_dir / "metrics.jsonl", json.dumps({"step": step, **metrics}, allow_nan=False))


async def run(config: EvalRunConfig, pool: Pool, run_dir: Path) -> dict[str, float]:
    """`megatron-rl eval`: evaluate what the engines hold, as step = its version. Returns the eval line without its step."""
    sources = load_sources(config.eval)
    renderer = Renderer.load(config.model.tokenizer_path, config.model.path)
    step = pool.version or 0
    trace = TraceStream(run_dir / "traces" / "stream.jsonl")
    metrics = await evaluate(
        sources,
        pool,
        renderer,
        context=config.model.context,
        seed=config.seed,
        max_inflight=config.inference.engines * config.inference.max_num_seqs,
        step=step,
        trace=trace,
    )
    trace.close()
    record(run_dir, step, metrics)
    return metrics
