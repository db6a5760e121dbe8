"""The process that evaluates: `python -m megatron_rl.launch.evaluator RESOLVED.json RESULTS.json ENGINE...`."""

import asyncio
import json
import os
import sys
from pathlib import Path

from megatron_rl.config.load import load
from megatron_rl.config.run import EvalRunConfig
from megatron_rl.evals import evaluator
from megatron_rl.inference.pool import EnginePool
from megatron_rl.launch.commands import TOKEN
from megatron_rl.launch.exit_codes import run_process
from megatron_rl.transports.atomic import write_atomic
from megatron_rl.transports.weights.filesystem import offer_checkpoint


async def evaluate(config: EvalRunConfig, results: Path, engines: list[str]) -> None:
    """Give the engines the weights of model.path, verified, and evaluate them."""
    run_dir = Path(config.run.dir)
    async with EnginePool(engines, os.environ[TOKEN]) as pool:
        offered = await asyncio.to_thread(offer_checkpoint, Path(config.model.path), run_dir)
        await pool.wait_ready(config.inference.start_timeout_s)
        await pool.update_weights(offered)
        metrics = await evaluator.run(config, pool, run_dir)
    results.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(results, json.dumps({"model": config.model.path, **metrics}, indent=2).encode() + b"\n")


def main(resolved: str, results: str, *engines: str) -> None:
    asyncio.run(evaluate(load(EvalRunConfig, ["--config", resolved]).config, Path(results), list(engines)))


if __name__ == "__main__":
    sys.exit(run_process(lambda: main(*sys.argv[1:])))
