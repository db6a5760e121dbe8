"""`megatron-rl orchestrator`: gives the orchestrator its engines and its batch server."""

import asyncio
import os
from pathlib import Path

from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import RLConfig
from megatron_rl.inference.pool import EnginePool
from megatron_rl.launch.commands import TOKEN
from megatron_rl.launch.run_dir import start_checkpoint
from megatron_rl.orchestrator.orchestrator import run
from megatron_rl.transports.batches.base import open_server


def main(config: RLConfig, engines: list[str], batches: str) -> None:
    """Run to the last step of `config`."""
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(f"{TOKEN} is not set: give engines, orchestrator and trainer ranks the same random string in it")
    asyncio.run(_run(config, engines, batches, token))


async def _run(config: RLConfig, engines: list[str], batches: str, token: str) -> None:
    checkpoint = start_checkpoint(config.run, config.resume)
    state = (checkpoint.path / "orchestrator" / "state.msgpack").read_bytes() if checkpoint else None
    weights = config.weights
    async with (
        EnginePool(engines, token, stage_timeout_s=weights.stage_timeout_s, verify=weights.verify) as pool,
        open_server(batches, token, keep=max(2, config.orchestrator.lag + 1)) as server,
    ):
        await pool.wait_ready(config.inference.start_timeout_s)
        await run(config, pool, server, Path(config.run.dir), state, checkpoint.step if checkpoint else 0)
