"""How trainer ranks pull the batch of a step from the orchestrator. One suite of tests runs over every transport.

A rank asks for a step by number and gets its own share; a step that is not there yet is waited for. Asking again is
harmless, so either side may be restarted. `open_server` and `open_client` choose the transport by the address:
"tcp://HOST:PORT" is zmq, anything else is a directory that both sides can reach.
"""

import hashlib
from types import TracebackType
from typing import Protocol, Self

from megatron_rl.transports.batches.records import StepBatch


class BatchError(Exception):
    """The other side refused, or what it sent can't be used. Waiting longer would not help."""


class BatchServer(Protocol):
    """The orchestrator's side, used within `async with`. `address` is what clients are given."""

    address: str

    async def publish(self, batch: StepBatch) -> None:
        """Offer a step to all ranks; the newest `keep` steps stay on offer. Steps must ascend: ValueError."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class BatchClient(Protocol):
    """A trainer rank's side."""

    def get(self, step: int, rank: int, ranks: int, timeout_s: float) -> StepBatch:
        """The share of data-parallel rank `rank` of `ranks` of batch `step`.

        TimeoutError names the address, the step and the seconds waited. BatchError: refused (wrong token, a step no
        longer kept).
        """
        ...

    def close(self) -> None: ...


def open_server(address: str, token: str, keep: int = 2) -> BatchServer:
    """keep: how many steps stay on offer; the orchestrator runs at most lag + 1 batches ahead."""
    if address.startswith("tcp://"):
        from megatron_rl.transports.batches.zmq import ZmqBatchServer

        return ZmqBatchServer(address, token, keep)
    from megatron_rl.transports.batches.filesystem import FilesystemBatchServer

    return FilesystemBatchServer(address, token, keep)


def open_client(address: str, token: str) -> BatchClient:
    if address.startswith("tcp://"):
        from megatron_rl.transports.batches.zmq import ZmqBatchClient

        return ZmqBatchClient(address, token)
    from megatron_rl.transports.batches.filesystem import FilesystemBatchClient

    return FilesystemBatchClient(address, token)


def fingerprint(token: str) -> str:
    """What may be written to disk in the token's place."""
    return hashlib.sha256(token.encode()).hexdigest()


def check_share(step: int, rank: int, ranks: int) -> None:
    """ValueError unless rank `rank` of `ranks` may ask for step `step`."""
    if not (step >= 1 and ranks >= 1 and 0 <= rank < ranks):
        raise ValueError(f"step {step}, rank {rank} of {ranks}: steps count from 1, ranks from 0")
