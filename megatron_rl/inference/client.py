"""HTTP client of one engine: token ids in, token ids out, and the steps of a weight update."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from megatron_rl.envs.protocol import Completion
from megatron_rl.inference.guard import UPDATING
from megatron_rl.transports.weights.base import WeightTransferError


class EngineError(Exception):
    """One line: which engine, what was asked, what it said."""


class EngineClient:
    """One vLLM server that `inference.server` started. Nothing is retried: a failed request is the caller's to repeat or to count."""

    def __init__(self, url: str, token: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session = session

    def __str__(self) -> str:
        return f"engine {self.url}"

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None = None, cache_salt: str | None = None
    ) -> Completion:
        """Sample one answer. Raises EngineError, also where the request was aborted or sampled by weights of no known version."""
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": 0, "detokenize": False}
        body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": cache_salt}
        answer = await self.post("/inference/v1/generate", body)
        try:
            choice = answer["choices"][0]
            completion = Completion(
                token_ids=choice["token_ids"],
                logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
                finish_reason=choice["finish_reason"],
                versions=[(int(span["version"]), span["start"], span["end"]) for span in choice["weight_versions"] or []],
            )
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self}: unexpected answer to generate ({type(error).__name__}: {error}): {answer!s:.500}") from error
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(f"{self}: generate ended with {completion.finish_reason!r} after {len(completion.token_ids)} tokens")
        if len(completion.logprobs) != len(completion.token_ids):
            raise EngineError(f"{self}: {len(completion.token_ids)} tokens came with {len(completion.logprobs)} logprobs")
        return completion

    async def wait_ready(self, timeout_s: float, died: Callable[[], str | None] = lambda: None) -> None:
        """Return once the server answers /health. `died` says why its process is gone, if it is. Raises EngineError."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                async with self._session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            if (reason := died()) is not None:
                raise EngineError(f"{self} died before it was ready: {reason}")
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(f"{self} was not ready within {timeout_s:g} s; see its log or raise inference.start_timeout_s")
            await asyncio.sleep(0.25)

    async def version(self) -> int | None:
        """The policy version it holds; None before the first one and after an update that broke it."""
        label = (await self._request("GET", "/weight_info"))["weight_version"]
        return int(label) if str(label).isdecimal() else None

    async def stage(self, version: int, directory: Path, verify: bool) -> None:
        """Have every worker copy and verify the version while the old one serves. Raises WeightTransferError naming the tensor."""
        wait = 0.01
        while "staging" in await self._workers("stage_weights", version, str(directory.resolve()), verify):
            await asyncio.sleep(wait)
            wait = min(2 * wait, 0.5)

    async def flip(self, version: int) -> None:
        """Put the staged version in place on every worker. On an error the engine serves nothing until another flip succeeds."""
        await self._label(UPDATING)
        await self._workers("flip_weights", version)
        await self._label(str(version))

    async def drop_staged(self) -> None:
        """Forget what was staged."""
        await self._workers("drop_staged_weights")

    async def pause(self) -> None:
        """Freeze the requests in flight, and those that come."""
        await self.post("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        """Go on with the frozen requests."""
        await self.post("/resume")

    async def abort_all(self) -> None:
        """End every request; its caller gets an EngineError."""
        await self.post("/abort_requests", {})

    async def _label(self, label: str) -> None:
        await self.post("/update_weight_version", {"new_version": label})

    async def _workers(self, method: str, *args: Any) -> list[str]:
        """Call a method of WeightsExtension on all workers of the engine; their states. Raises the first failure as WeightTransferError."""
        answer = await self.post("/collective_rpc", {"method": method, "args": list(args)})
        for rank, result in enumerate(answer["results"]):
            if result["state"] == "failed":
                where = f"worker {rank}: " if len(answer["results"]) > 1 else ""
                raise WeightTransferError(where + result["reason"], result["tensor"])
        return [result["state"] for result in answer["results"]]

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer to a POST. Raises EngineError on any other status than 200 and when there is no answer."""
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        what = f"{self}: {path.split('?')[0]}"
        try:
            async with self._session.request(method, self.url + path, json=body, headers=self._headers) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"{what} got no answer ({type(error).__name__}: {error}); is the engine still running?") from error
        if answer.status != 200:
            raise EngineError(f"{what} answered {answer.status}: {_said(content)}")
        return json.loads(content) if content else None


def _said(content: bytes) -> str:
    """The message of an error answer, on one line."""
    text = content.decode(errors="replace")
    try:
        error = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:500]
    error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
    return " ".join(str(error.get("message", error) if isinstance(error, dict) else error).split())[:500]
