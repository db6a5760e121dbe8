"""The SFT trainer: the same train step, on packed conversations with cross-entropy on assistant tokens."""

import json
import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_rl.algorithms import build_loss
from megatron_rl.config.run import RLConfig, SftRunConfig
from megatron_rl.config.trainer import SftConfig
from megatron_rl.envs.rendering import Renderer
from megatron_rl.platform import World
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.conversations import load_samples
from megatron_rl.trainer.session import open_session
from megatron_rl.trainer.step import train_step
from megatron_rl.transports.atomic import append_line
from megatron_rl.transports.batches.packing import pack
from megatron_rl.transports.batches.records import StepBatch, TrainingSample


def main(config: RLConfig | SftRunConfig, world: World, resume_from: Path | None = None) -> None:
    """One rank, from the first to the last step; exports hf/sft (collective over all ranks)."""
    sft, trainer, run_dir = config.sft, config.trainer, Path(config.run.dir)
    assert sft is not None
    session = open_session(
        world, config.model, config.model.path, trainer, sft.optim, sft.scheduler, sft.steps, resume_from, config.precision
    )
    samples = load_samples(Path(sft.data), Renderer.load(config.model.tokenizer_path).tokenizer, config.model.context)
    rl_loss = build_loss(trainer.loss.name, **trainer.loss.options)
    for step in range(session.start + 1, sft.steps + 1):
        started = time.perf_counter()
        batch = step_batch(samples, sft, step, trainer.micro_batch_tokens, world.data_size)
        metrics = train_step(session.policy, session.optimizer, rl_loss, batch.slice(world.data_rank, world.data_size), world)
        saves = isinstance(config, SftRunConfig) and checkpoint.due(step, sft.steps, trainer.checkpoint.interval)
        if saves:
            checkpoint.save(run_dir, step, session.optimizer, b"")
        if world.rank == 0:
            line = {"step": step, **metrics, "time/step": time.perf_counter() - started}
            append_line(run_dir / "sft_metrics.jsonl", json.dumps(line, allow_nan=False))
            if saves:  # after the line: a run resumed from this step has it
                checkpoint.complete(run_dir, step, trainer.checkpoint.keep_last)
    session.save_hf(run_dir / "hf" / "sft")


def step_batch(samples: list[TrainingSample], sft: SftConfig, step: int, micro_batch_tokens: int, data_parallel: int) -> StepBatch:
    """The batch of step 1, 2, ...: rows in an order drawn anew each epoch from (seed, epoch), so any step can be made alone."""
    rows = [draw(len(samples), sft.seed, i) for i in range((step - 1) * sft.batch_size, step * sft.batch_size)]
    picked = [samples[row] for row in rows]
    return StepBatch(step, step - 1, pack(picked, step, step - 1, capacity=micro_batch_tokens, data_parallel=data_parallel))


def draw(rows: int, seed: int, i: int) -> int:
    """The i-th row drawn: a permutation of all rows per epoch."""
    epoch, place = divmod(i, rows)
    return int(epoch_order(rows, seed, epoch)[place])


@lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)
