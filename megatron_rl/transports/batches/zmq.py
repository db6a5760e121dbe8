"""Batches over TCP: ranks ask, the orchestrator's ROUTER socket answers once the step is published.

Request: one msgpack frame {token, step, rank, ranks}. Reply: one msgpack frame {share: [step, rank, ranks], error} and,
without an error, the encoded share. A client repeats its request every few seconds, which finds a server that was
restarted, and passes over replies to other requests than its last; the server keeps one open request per connection.
"""

import asyncio
import hmac
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq
import zmq.asyncio

from megatron_rl.transports.batches.base import BatchError, check_share
from megatron_rl.transports.batches.records import StepBatch, decode, encode

REPEAT_S = 5.0


@dataclass(frozen=True)
class _Request:
    step: int
    rank: int
    ranks: int


class ZmqBatchServer:
    """Binds in the constructor; port * picks a free one, `address` then holds it. IPv6 as tcp://[::1]:PORT."""

    def __init__(self, address: str, token: str, keep: int = 2) -> None:
        self._token, self._keep = token, keep
        self._batches: dict[int, StepBatch] = {}
        self._encoded: dict[_Request, bytes] = {}
        self._waiting: dict[bytes, _Request] = {}
        self._serving: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise BatchError(f"batch server can't bind {address}: {error.strerror}; choose another port") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._serve(), name="batch server")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def publish(self, batch: StepBatch) -> None:
        if self._batches and batch.step <= max(self._batches):
            raise ValueError(f"step {batch.step} published after step {max(self._batches)}")
        if self._serving is not None and self._serving.done():
            self._serving.result()
        self._batches[batch.step] = batch
        for old in sorted(self._batches)[: -self._keep]:
            del self._batches[old]
        self._encoded = {request: data for request, data in self._encoded.items() if request.step in self._batches}
        for identity, request in list(self._waiting.items()):
            await self._answer(identity, request)

    async def _serve(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            request = self._read(frames)
            if isinstance(request, str):
                await self._send(identity, None, request)
            else:
                await self._answer(identity, request)

    def _read(self, frames: list[bytes]) -> _Request | str:
        """The request, or what is wrong with it."""
        try:
            fields: Any = msgpack.unpackb(b"".join(frames))
            token = str(fields["token"])
            request = _Request(int(fields["step"]), int(fields["rank"]), int(fields["ranks"]))
            check_share(request.step, request.rank, request.ranks)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            return f"not a batch request: {type(error).__name__}: {error}"
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return "wrong token: trainer and orchestrator must share MEGATRON_RL_TOKEN"
        return request

    async def _answer(self, identity: bytes, request: _Request) -> None:
        self._waiting.pop(identity, None)
        if not self._batches or request.step > max(self._batches):
            self._waiting[identity] = request
        elif request.step in self._batches:
            if request not in self._encoded:
                self._encoded[request] = encode(self._batches[request.step].slice(request.rank, request.ranks))
            await self._send(identity, request, "", self._encoded[request])
        else:
            kept = ", ".join(map(str, sorted(self._batches)))
            error = f"step {request.step} is no longer kept, only {kept}; resume the trainer from a checkpoint"
            await self._send(identity, request, error)

    async def _send(self, identity: bytes, request: _Request | None, error: str, *data: bytes) -> None:
        share = [request.step, request.rank, request.ranks] if request else None
        await self._socket.send_multipart([identity, msgpack.packb({"share": share, "error": error}), *data])


class ZmqBatchClient:
    """One rank's connection. It is made in the background, and again when it breaks."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._socket.connect(address)

    def get(self, step: int, rank: int, ranks: int, timeout_s: float) -> StepBatch:
        check_share(step, rank, ranks)
        request = msgpack.packb({"token": self._token, "step": step, "rank": rank, "ranks": ranks})
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self._socket.send(request)
            repeat = time.monotonic() + min(left, REPEAT_S)
            while (left := repeat - time.monotonic()) > 0 and self._socket.poll(int(1000 * left) + 1):
                head, *data = self._socket.recv_multipart()
                reply = msgpack.unpackb(head)
                if reply["share"] not in ([step, rank, ranks], None):
                    continue
                if reply["error"]:
                    raise BatchError(f"{self._address}: {reply['error']}")
                return decode(data[0])
        raise TimeoutError(f"no batch of step {step} from {self._address} within {timeout_s:g} s; is the orchestrator alive?")

    def close(self) -> None:
        self._context.destroy(linger=0)
