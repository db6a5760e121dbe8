"""ASGI middleware inside the vLLM server (`--middleware`): a token on every route but /health, and no sampling from unverified weights."""

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN_VARIABLE = "MEGATRON_RL_TOKEN"
WATCHER_VARIABLE = "MEGATRON_RL_ENGINE_WATCHER"
"""Process id of the `megatron-rl inference` that started the server."""
UPDATING = "updating"
"""Weight-version label of an engine whose weights are of no version. Any other label is a version number."""
CLOSED_WITHOUT_WEIGHTS = ("/inference/", "/v1/", "/generate", "/invocations")


class Guard:
    """Refuses requests without the bearer token (401), and sampling while the engine's version label is not a number (503)."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.token = os.environ[TOKEN_VARIABLE]
        self.holds_version = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        header = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(header, f"Bearer {self.token}".encode()):
            return await _refuse(scope, send, 401, "this engine wants the run's token: Authorization: Bearer $MEGATRON_RL_TOKEN")
        if not self.holds_version and scope["path"].startswith(CLOSED_WITHOUT_WEIGHTS):
            return await _refuse(scope, send, 503, "this engine holds no verified weights; update it to a version first")
        if scope["path"] == "/update_weight_version":
            return await self._label(scope, receive, send)
        return await self.app(scope, receive, send)

    async def _label(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on a change of the version label, closed from its start unless it is a number that the engine accepted."""
        self.holds_version = False
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        is_version = str(json.loads(body)["new_version"]).isdecimal() if body else False
        replayed = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(replayed, None) or await receive()

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.holds_version = is_version and message["status"] == 200
            await send(message)

        await self.app(scope, replay, watch)


async def _refuse(scope: Message, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008, "reason": reason})
    body = json.dumps({"error": {"message": reason, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
