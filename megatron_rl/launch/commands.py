"""Command lines and environments of the processes of a run."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

TOKEN = "MEGATRON_RL_TOKEN"
"""Environment variable with the secret of every control API of a run."""


def subcommand(name: str, resolved: Path, *options: str) -> list[str]:
    """`megatron-rl NAME --config RESOLVED.json ...` with this very interpreter."""
    return [sys.executable, "-m", "megatron_rl.cli", name, "--config", str(resolved), *options]


def module(name: str, *arguments: str) -> list[str]:
    """A process of the launcher's own: megatron_rl.launch.NAME."""
    return [sys.executable, "-m", f"megatron_rl.launch.{name}", *arguments]


def run_environment() -> dict[str, str]:
    """Of every process: models come from disk only, and waiting threads do not spin on the cores others need."""
    fixed = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    chosen = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
    return fixed | {key: os.environ.get(key, value) for key, value in chosen.items()}


def rank_environments(ranks: int, port: int, threads: int | None) -> Iterator[dict[str, str]]:
    """What torchrun would set, for each rank on this machine."""
    cores = len(os.sched_getaffinity(0))
    for rank in range(ranks):
        yield {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads or max(1, cores // ranks)),
        }
