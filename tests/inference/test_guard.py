"""The middleware inside the server: who may ask, and when it may sample. The application behind it is a recorder."""

import asyncio
import json

import pytest

from megatron_rl.inference.guard import Guard


class Application:
    """Answers every request with `status`, and keeps the bodies it was given."""

    def __init__(self) -> None:
        self.status, self.bodies = 200, []

    async def __call__(self, scope, receive, send) -> None:
        self.bodies.append((await receive()).get("body"))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def guarded(monkeypatch) -> tuple[Guard, Application]:
    monkeypatch.setenv("MEGATRON_RL_TOKEN", "secret")
    application = Application()
    return Guard(application), application


def ask(guard: Guard, path: str, token: str | None = "secret", body: bytes | list[bytes] = b"", kind: str = "http") -> int:
    """The status of the answer."""
    parts = body if isinstance(body, list) else [body]
    messages = iter([{"type": "http.request", "body": part, "more_body": i < len(parts) - 1} for i, part in enumerate(parts)])
    sent = []

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", f"Bearer {token}".encode())] if token is not None else []
    asyncio.run(guard({"type": kind, "path": path, "headers": headers, "method": "POST"}, receive, send))
    return sent[0]["status"] if kind == "http" else sent[0]["code"]


def label(guard: Guard, version: str) -> int:
    return ask(guard, "/update_weight_version", body=json.dumps({"new_version": version}).encode())


def test_health_is_open_and_everything_else_wants_the_token(guarded):
    guard, application = guarded
    assert ask(guard, "/health", token=None) == 200
    for path in ("/", "/health/", "/metrics", "/pause", "/inference/v1/generate", "/update_weight_version"):
        assert [ask(guard, path, token=token) for token in (None, "", "secre", "secret2")] == [401] * 4, path
    assert ask(guard, "/v1/realtime", token="wrong", kind="websocket") == 1008
    assert application.bodies == [b""]


def test_no_sampling_before_a_version_is_held(guarded):
    guard, _ = guarded
    assert ask(guard, "/inference/v1/generate") == 503
    assert ask(guard, "/v1/completions") == 503
    assert ask(guard, "/collective_rpc") == 200
    assert label(guard, "0") == 200
    assert ask(guard, "/inference/v1/generate") == 200


def test_sampling_stops_from_the_start_of_a_flip_until_the_new_version_is_held(guarded):
    guard, _ = guarded
    label(guard, "3")
    label(guard, "updating")
    assert ask(guard, "/inference/v1/generate") == 503
    label(guard, "4")
    assert ask(guard, "/inference/v1/generate") == 200


def test_a_version_that_the_server_did_not_accept_is_not_held(guarded):
    guard, application = guarded
    application.status = 500
    assert label(guard, "0") == 500
    application.status = 200
    assert ask(guard, "/inference/v1/generate") == 503


def test_the_label_reaches_the_server_as_it_was_sent(guarded):
    guard, application = guarded
    assert ask(guard, "/update_weight_version", body=[b'{"new_ver', b'sion": "12"}']) == 200
    assert application.bodies == [b'{"new_version": "12"}']
    assert ask(guard, "/inference/v1/generate") == 200


def test_a_server_without_a_token_does_not_start(monkeypatch):
    monkeypatch.delenv("MEGATRON_RL_TOKEN", raising=False)
    with pytest.raises(KeyError, match="MEGATRON_RL_TOKEN"):
        Guard(Application())
