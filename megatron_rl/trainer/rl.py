"""The RL trainer: pull a batch, train, publish the weights. Knows tokens and weights, no algorithm."""

import json
import time
from pathlib import Path

from megatron_rl.algorithms import build_loss
from megatron_rl.algorithms.losses import Loss
from megatron_rl.config.run import RLConfig
from megatron_rl.conversion import export_tensors
from megatron_rl.platform import World
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.session import Session, open_session
from megatron_rl.trainer.step import train_step
from megatron_rl.transports.atomic import append_line
from megatron_rl.transports.batches.base import BatchClient
from megatron_rl.transports.weights.filesystem import FilesystemSender


def start_weights(config: RLConfig) -> str:
    """HF directory RL starts from: the warm-up's export if there is a warm-up, else the model."""
    return f"{config.run.dir}/hf/sft" if config.warms_up else config.model.path


def main(config: RLConfig, world: World, batches: BatchClient, resume_from: Path | None = None) -> None:
    """One rank, from the first to the last step (collective over all ranks)."""
    trainer, run_dir = config.trainer, Path(config.run.dir)
    session = open_session(
        world, config.model, start_weights(config), trainer, trainer.optim, trainer.scheduler, trainer.steps, resume_from, config.precision
    )
    rl_loss = build_loss(trainer.loss.name, **trainer.loss.options)
    sender = None if trainer.replay else FilesystemSender(run_dir, config.weights.keep_last)
    publish(session, sender, session.start)
    for step in range(session.start + 1, trainer.steps + 1):
        run_step(config, session, rl_loss, batches, sender, step)
    session.save_hf(run_dir / "hf" / f"step_{trainer.steps}")


def run_step(config: RLConfig, session: Session, rl_loss: Loss, batches: BatchClient, sender: FilesystemSender | None, step: int) -> None:
    """One step: pull, train, publish, save, log."""
    world, trainer, run_dir = session.world, config.trainer, Path(config.run.dir)
    clock = [time.perf_counter()]
    batch = batches.get(step, world.data_rank, world.data_size, config.orchestrator.batch_timeout_s)
    clock.append(time.perf_counter())
    metrics = train_step(session.policy, session.optimizer, rl_loss, batch, world)
    clock.append(time.perf_counter())
    publish(session, sender, step)
    clock.append(time.perf_counter())
    saves = checkpoint.due(step, trainer.steps, trainer.checkpoint.interval)
    if saves:
        checkpoint.save(run_dir, step, session.optimizer, batch.orchestrator_state)
        metrics["time/checkpoint"] = time.perf_counter() - clock[-1]
    if world.rank == 0:
        line = {
            "step": step,
            "policy_version": batch.policy_version,
            **batch.metrics,
            **metrics,
            "time/wait_batch": clock[1] - clock[0],
            "time/weight_update": clock[3] - clock[2],
            "time/step": time.perf_counter() - clock[0],
        }
        append_line(run_dir / "metrics.jsonl", json.dumps(line, allow_nan=False))
        if saves:  # after the line: a run resumed from this step has it
            checkpoint.complete(run_dir, step, trainer.checkpoint.keep_last)


def publish(session: Session, sender: FilesystemSender | None, version: int) -> None:
    """Offer the weights after `version` steps to the engines (collective)."""
    if sender:
        sender.publish(version, export_tensors(session.policy), session.world)
        sender.prune()
