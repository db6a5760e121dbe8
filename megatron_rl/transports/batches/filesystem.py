"""Batches as files `step_<n>.batch` in a directory both sides can reach: a transport, and the format of dumps for replay."""

import asyncio
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_rl.transports.atomic import write_atomic
from megatron_rl.transports.batches.base import BatchError, check_share, fingerprint
from megatron_rl.transports.batches.records import StepBatch, decode, encode

SESSION = "session.json"
POLL_S = 0.02


def batch_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step}.batch"


def write_batch(directory: Path, batch: StepBatch) -> None:
    """Keep a whole step for replay. Atomic; the directory is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(batch_path(directory, batch.step), encode(batch))


def read_batch(directory: Path, step: int) -> StepBatch:
    """A dumped step. BatchError names what is missing or damaged."""
    path = batch_path(directory, step)
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        steps = sorted(int(p.stem.removeprefix("step_")) for p in directory.glob("step_*.batch"))
        held = f"it holds steps {steps[0]} to {steps[-1]}" if steps else "it holds no batches"
        raise BatchError(f"no batch of step {step} in {directory}: {held}") from None
    except ValueError as error:
        raise BatchError(f"{path} is damaged: {error}") from error


class FilesystemBatchServer:
    """The directory belongs to one server at a time: batches that an earlier one left in it are removed on entry.

    session.json holds the token's fingerprint, so a client never takes another session's files for ours.
    """

    def __init__(self, address: str, token: str, keep: int = 2) -> None:
        self.address = address
        self._directory, self._token, self._keep = Path(address), token, keep
        self._steps: list[int] = []

    async def __aenter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / SESSION).unlink(missing_ok=True)
        for left in self._directory.glob("step_*.batch"):
            left.unlink()
        write_atomic(self._directory / SESSION, json.dumps({"token_sha256": fingerprint(self._token)}).encode())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None  # ranks may still be reading

    async def publish(self, batch: StepBatch) -> None:
        if self._steps and batch.step <= self._steps[-1]:
            raise ValueError(f"step {batch.step} published after step {self._steps[-1]}")
        await asyncio.to_thread(write_batch, self._directory, batch)
        self._steps.append(batch.step)
        while len(self._steps) > self._keep:
            batch_path(self._directory, self._steps.pop(0)).unlink()


class FilesystemBatchClient:
    """Polls the directory; every rank reads the whole step and takes its share."""

    def __init__(self, address: str, token: str) -> None:
        self._directory, self._token = Path(address), token

    def get(self, step: int, rank: int, ranks: int, timeout_s: float) -> StepBatch:
        check_share(step, rank, ranks)
        deadline = time.monotonic() + timeout_s
        problem = "is the orchestrator alive?"
        while time.monotonic() < deadline:
            problem = self._session_problem()
            if not problem:
                if batch_path(self._directory, step).exists():
                    return read_batch(self._directory, step).slice(rank, ranks)
                if any(int(p.stem.removeprefix("step_")) > step for p in self._directory.glob("step_*.batch")):
                    raise BatchError(f"{self._directory}: step {step} is no longer kept; resume the trainer from a checkpoint")
                problem = "is the orchestrator alive?"
            time.sleep(POLL_S)
        raise TimeoutError(f"no batch of step {step} in {self._directory} within {timeout_s:g} s; {problem}")

    def close(self) -> None:
        return None

    def _session_problem(self) -> str:
        try:
            session = json.loads((self._directory / SESSION).read_bytes())
        except FileNotFoundError:
            return "no orchestrator has opened it"
        if session.get("token_sha256") != fingerprint(self._token):
            return "it belongs to a session with another token (MEGATRON_RL_TOKEN), or the orchestrator has not started"
        return ""


class ReplayClient:
    """Reads a dump; what is missing is an error at once, nobody is going to write it."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def get(self, step: int, rank: int, ranks: int, timeout_s: float) -> StepBatch:
        check_share(step, rank, ranks)
        return read_batch(self._directory, step).slice(rank, ranks)

    def close(self) -> None:
        return None
