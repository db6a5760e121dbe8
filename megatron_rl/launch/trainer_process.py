"""`megatron-rl trainer`: one trainer rank."""

import os
from pathlib import Path

from megatron_rl import platform
from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import RLConfig, SftRunConfig
from megatron_rl.launch.commands import TOKEN
from megatron_rl.launch.run_dir import start_checkpoint
from megatron_rl.transports.batches.base import BatchClient, open_client


def main(config: RLConfig | SftRunConfig, stage: str, batches: str | None) -> None:
    """Train one stage as the rank that the environment says. `batches`: where the rl stage pulls them from."""
    platform.install()
    checkpoint = start_checkpoint(config.run, config.resume)
    if stage == "sft":
        from megatron_rl.trainer import sft

        # in an rl run a checkpoint is one of RL, and the warm-up is behind it
        sft.main(config, checkpoint.path if checkpoint and isinstance(config, SftRunConfig) else None)
        return
    if not isinstance(config, RLConfig):
        raise ConfigError("--stage rl needs an rl config (--kind rl)")
    from megatron_rl.trainer import rl

    client = _client(config, batches)
    try:
        rl.main(config, client, checkpoint.path if checkpoint else None)
    finally:
        client.close()


def _client(config: RLConfig, batches: str | None) -> BatchClient:
    if config.trainer.replay is not None:
        from megatron_rl.transports.batches.filesystem import ReplayClient

        return ReplayClient(Path(config.trainer.replay))
    if batches is None:
        raise ConfigError("--batches: give the address at which the orchestrator serves batches, or trainer.replay dumped ones")
    return open_client(batches, os.environ.get(TOKEN, ""))
