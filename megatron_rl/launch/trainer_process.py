"""`megatron-rl trainer`: one trainer rank."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl import platform
from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import RLConfig, SftRunConfig
from megatron_rl.launch.commands import TOKEN
from megatron_rl.launch.run_dir import start_checkpoint
from megatron_rl.transports.batches.base import BatchClient, open_client

if TYPE_CHECKING:
    from megatron_rl.platform import World


def main(config: RLConfig | SftRunConfig, stage: str, batches: str | None) -> None:
    """Train one stage as the rank that the environment says. `batches`: where the rl stage pulls them from."""
    if stage == "rl" and not isinstance(config, RLConfig):
        raise ConfigError("--stage rl needs an rl config (--kind rl)")
    world = join(config)
    if stage == "sft":
        warm_up(config, world)
    elif isinstance(config, RLConfig):
        train(config, world, batches)
    world.shutdown()


def join(config: RLConfig | SftRunConfig) -> "World":
    """Meet the other ranks; once in a process, whatever stages follow."""
    platform.install()
    trainer = config.trainer
    return platform.initialize(trainer.parallel, config.seed, trainer.collective_timeout_s, trainer.threads)


def warm_up(config: RLConfig | SftRunConfig, world: "World") -> None:
    """The sft stage. In an rl run a checkpoint is one of RL, and the warm-up is behind it."""
    from megatron_rl.trainer import sft

    checkpoint = start_checkpoint(config.run, config.resume) if isinstance(config, SftRunConfig) else None
    sft.main(config, world, checkpoint.path if checkpoint else None)


def train(config: RLConfig, world: "World", batches: str | None) -> None:
    """The rl stage."""
    from megatron_rl.trainer import rl

    checkpoint = start_checkpoint(config.run, config.resume)
    client = _client(config, batches)
    try:
        rl.main(config, world, client, checkpoint.path if checkpoint else None)
    finally:
        client.close()


def _client(config: RLConfig, batches: str | None) -> BatchClient:
    if config.trainer.replay is not None:
        from megatron_rl.transports.batches.filesystem import ReplayClient

        return ReplayClient(Path(config.trainer.replay))
    if batches is None:
        raise ConfigError("--batches: give the address at which the orchestrator serves batches, or trainer.replay dumped ones")
    return open_client(batches, os.environ.get(TOKEN, ""))
