"""The orchestrator: wires tasks, rollouts, groups, batches and versions into one loop."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Protocol

import msgpack
import numpy as np

from megatron_rl.algorithms.advantages import build_advantage
from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import RLConfig
from megatron_rl.envs.rendering import Renderer
from megatron_rl.envs.sources import load_sources
from megatron_rl.evals import evaluator
from megatron_rl.evals.rollouts import Pool
from megatron_rl.orchestrator.batches import BatchBuilder, Selection
from megatron_rl.orchestrator.dispatcher import Dispatcher, with_engines
from megatron_rl.orchestrator.groups import Group, Judged, judge
from megatron_rl.orchestrator.metrics import batch_metrics
from megatron_rl.orchestrator.staleness import too_stale
from megatron_rl.orchestrator.tasks import Tasks
from megatron_rl.orchestrator.versions import VersionWatcher
from megatron_rl.traces.records import Rollout
from megatron_rl.traces.stream import TraceStream
from megatron_rl.transports.batches.filesystem import write_batch
from megatron_rl.transports.batches.packing import pack, padding_fraction
from megatron_rl.transports.batches.records import StepBatch, TrainingSample

log = logging.getLogger(__name__)

STATE_FORMAT = 1


class Server(Protocol):
    """Where trainer ranks pull batches from."""

    async def publish(self, batch: StepBatch) -> None: ...


async def run(
    config: RLConfig, pool: Pool, server: Server, run_dir: str | Path, resume_state: bytes | None = None, start_step: int = 0
) -> None:
    """Make batches start_step + 1 ... trainer.steps, keep the engines at the trainer's weights, evaluate; return after the last eval.

    resume_state: the orchestrator_state of batch `start_step`. Raises ConfigError (the user's mistake), EngineFailure,
    UpdateError, TimeoutError (the trainer delivers no weights).
    """
    orchestrator = Orchestrator(config, pool, Path(run_dir), resume_state, start_step)
    try:
        for step in range(start_step + 1, config.trainer.steps + 1):
            await orchestrator.publish(server, await orchestrator.collect(step))
        await orchestrator.finish()
    finally:
        await orchestrator.close()


class Orchestrator:
    """The parts of one run, and what passes between them."""

    def __init__(self, config: RLConfig, pool: Pool, run_dir: Path, resume_state: bytes | None, start_step: int) -> None:
        if config.model.context > config.trainer.micro_batch_tokens:
            raise ConfigError(
                f"model.context = {config.model.context} exceeds trainer.micro_batch_tokens = {config.trainer.micro_batch_tokens}: "
                f"samples are never cut; raise the one or lower the other"
            )
        limits = config.orchestrator
        self.config, self.pool, self.run_dir = config, pool, run_dir
        self.renderer = Renderer.load(config.model.tokenizer_path, config.model.path)
        self.sources = {source.id: source for source in load_sources(config.train)}
        self.eval_sources = load_sources(config.eval)
        evaluator.check(self.eval_sources)
        self.advantage = build_advantage(config.train.advantage, **config.train.advantage_options)
        self.tasks = Tasks(list(self.sources.values()), config.seed)
        self._restore(resume_state, start_step)
        self.trace = TraceStream(run_dir / "traces" / "stream.jsonl")
        self.wake = asyncio.Event()
        self.dispatcher = Dispatcher(with_engines(pool, self.renderer, config.model.context, config.seed), limits.max_inflight, self.wake)
        lag = 0 if config.deterministic else limits.lag
        self.builder = BatchBuilder(limits, lag, config.trainer.steps, in_order=config.deterministic)
        self.open: list[Group] = []
        self.consecutive_errors = self.cancelled_before = 0
        self.versions = VersionWatcher(
            run_dir,
            pool,
            start=start_step,
            last=config.trainer.steps,
            timeout_s=limits.batch_timeout_s,
            on_version=self.evaluate_if_due,
            exclusive=config.deterministic,
            wake=self.wake,
        )
        self.watching = asyncio.create_task(self.versions.run(), name="version watcher")
        self.watching.add_done_callback(lambda _: self.wake.set())

    def _restore(self, state: bytes | None, start_step: int) -> None:
        if state is None:
            if start_step:
                raise ConfigError(f"step {start_step} can't be resumed without the orchestrator's state; its checkpoint is incomplete")
            return
        saved = msgpack.unpackb(state)
        if (saved["format"], saved["step"]) != (STATE_FORMAT, start_step):
            found = f"step {saved['step']}, format {saved['format']}"
            raise ConfigError(f"the orchestrator's state is of {found}; step {start_step}, format {STATE_FORMAT} was expected")
        for remark in self.tasks.restore(saved["tasks"]):
            log.warning("resume: %s", remark)

    async def collect(self, step: int) -> StepBatch:
        """Generate until batch `step` is complete."""
        started = time.perf_counter()
        while True:
            self._receive(step)
            self._drop_stale(step)
            # A deterministic run looks at groups wave by wave: which of a wave completes first must decide nothing.
            if not (self.config.deterministic and self.dispatcher.load):
                if (selection := self.builder.take(step)) is not None:
                    return self._build(selection, started)
                self._open_groups(step)
            await self.wake.wait()
            self.wake.clear()
            if self.watching.done():
                self.watching.result()

    def _open_groups(self, step: int) -> None:
        version = self.versions.version
        if version is None:
            return
        while self.dispatcher.has_room and self.builder.wanted(step, version, sum(group.size for group in self.open)) > 0:
            draw = self.tasks.draw()
            source = self.sources[draw.source]
            group = Group(draw, source, source.task(draw.index), version)
            self.open.append(group)
            self.dispatcher.open(group)

    def _receive(self, step: int) -> None:
        for group, index, rollout in self.dispatcher.take():
            self._count_errors(rollout)
            if group not in self.open:  # dropped as stale meanwhile
                self.trace.append(rollout, kind="train", step=step, fate="stale")
            elif group.add(index, rollout):
                self.open.remove(group)
                judged = judge(group, self.advantage, self.config.orchestrator.filter_zero_advantage)
                if judged.fate != "train":
                    self._settle(judged, step, judged.fate)
                self.builder.add(judged, step)

    def _count_errors(self, rollout: Rollout) -> None:
        if rollout.finish_reason in ("error", "timeout"):
            self.consecutive_errors += 1
            log.warning("rollout %s ended in %s: %s", rollout.rollout_id, rollout.finish_reason, rollout.error)
        elif rollout.ok:
            self.consecutive_errors = 0
        limit = self.config.orchestrator.max_consecutive_errors
        if self.consecutive_errors >= limit:
            raise ConfigError(f"{limit} rollouts in a row ended in an error or a timeout, the last: {rollout.error}")

    def _drop_stale(self, step: int) -> None:
        """Drop what is too stale for batch `step`: ready groups by their oldest token, open ones by the version they started with."""
        for judged in self.builder.expire(step):
            self._settle(judged, step, "stale")
        for group in [g for g in self.open if too_stale(step, g.version, self.config.orchestrator.max_off_policy_steps)]:
            self.open.remove(group)
            self.dispatcher.cancel(group)
            judged = Judged(group, "stale", [])
            self._settle(judged, step, "stale")
            self.builder.add(judged, step)

    def _settle(self, judged: Judged, step: int, fate: str) -> None:
        """The group's fate is known: trace its rollouts; its task is not dispatched again."""
        advantages = {id(rollout): advantage for rollout, advantage in judged.usable}
        for rollout in judged.group.rollouts.values():
            if id(rollout) in advantages:
                self.trace.append(rollout, kind="train", step=step, fate=fate, advantage=advantages[id(rollout)])
            elif rollout.ok:  # of a batch's last group that did not fit, or of a group that never became complete
                self.trace.append(rollout, kind="train", step=step, fate="surplus" if fate == "shipped" else fate)
            else:
                self.trace.append(rollout, kind="train", step=step, fate=rollout.finish_reason)
        self.tasks.settle(judged.group.draw.number)

    def _build(self, selection: Selection, started: float) -> StepBatch:
        step, config, version = selection.step, self.config, self.versions.version
        seconds = time.perf_counter() - started
        for judged in selection.groups:
            self._settle(judged, step, "shipped")
        packing = time.perf_counter()
        micro_batches = pack(
            [training_sample(rollout, advantage) for rollout, advantage in selection.rollouts],
            step,
            version,
            capacity=config.trainer.micro_batch_tokens,
            data_parallel=config.trainer.parallel.replicas,
            keep_order=config.deterministic,
        )
        metrics = batch_metrics(selection) | {
            "rollouts/cancelled": self.dispatcher.cancelled - self.cancelled_before,
            "tokens/padding_fraction": padding_fraction(micro_batches),
            "time/generate": seconds,
            "time/pack": time.perf_counter() - packing,
        }
        self.cancelled_before = self.dispatcher.cancelled
        state = msgpack.packb({"format": STATE_FORMAT, "step": step, "tasks": self.tasks.state()})
        return StepBatch(step, version, micro_batches, metrics, state)

    async def publish(self, server: Server, batch: StepBatch) -> None:
        if self.config.deterministic or self.config.dump_batches:
            await asyncio.to_thread(write_batch, self.run_dir / "batches", batch)
        await server.publish(batch)
        self.versions.shipped(batch.step)
        m = batch.metrics
        log.info(
            "batch %d: reward %.4f, %d rollouts, %d groups filtered, staleness %.2f, generated in %.1f s",
            batch.step,
            m["reward/mean"],
            m["rollouts/trained"],
            m["groups/filtered"],
            m["staleness/mean"],
            m["time/generate"],
        )

    async def evaluate_if_due(self, version: int) -> None:
        """Before the first step, every eval.interval steps, after the last one; once each, also over restarts."""
        interval, last = self.config.eval.interval, self.config.trainer.steps
        due = version in (0, last) or (interval is not None and version % interval == 0)
        if not (due and self.eval_sources) or was_evaluated(self.run_dir / "metrics.jsonl", version):
            return
        limits = self.config.orchestrator
        metrics = await evaluator.evaluate(
            self.eval_sources,
            self.pool,
            self.renderer,
            context=self.config.model.context,
            seed=self.config.seed,
            max_inflight=limits.max_inflight,
            step=version,
            trace=self.trace,
        )
        evaluator.record(self.run_dir, version, metrics)
        log.info(
            "version %d: %s", version, ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if "@" in name or "exact" in name)
        )

    async def finish(self) -> None:
        """Wait until the engines hold the last version and it was evaluated."""
        await self.dispatcher.close()
        last = self.config.trainer.steps
        left = [rollout for group in self.open for rollout in group.rollouts.values()]
        for rollout in [*left, *(rollout for _, _, rollout in self.dispatcher.take())]:
            self.trace.append(rollout, kind="train", step=last, fate="unshipped")
        for judged in self.builder.ready:
            self._settle(judged, last, "unshipped")
        await self.watching

    async def close(self) -> None:
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)
        await self.dispatcher.close()
        self.trace.close()


def training_sample(rollout: Rollout, advantage: float) -> TrainingSample:
    """A rollout's tokens with its advantage on those that were sampled."""
    streams = {
        "token_ids": rollout.token_ids,
        "loss_mask": rollout.sampled,
        "inference_logprobs": rollout.logprobs,
        "temperatures": np.full(len(rollout.token_ids), rollout.temperature, np.float32),
        "advantages": np.where(rollout.sampled, np.float32(advantage), np.float32(0.0)),
    }
    return TrainingSample(rollout.rollout_id, rollout.rollout_id, streams)


def was_evaluated(metrics: Path, version: int) -> bool:
    """Whether metrics.jsonl has an eval line of `version` already."""
    if not metrics.is_file():
        return False
    rows = (json.loads(line) for line in metrics.read_text().splitlines())
    return any(row["step"] == version and any(key.startswith("eval/") for key in row) for row in rows)
