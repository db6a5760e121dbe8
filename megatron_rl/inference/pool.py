"""All engines of a run as one policy: sticky least-loaded sampling, and weight updates on all of them together."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import aiohttp

from megatron_rl.envs.protocol import Completion
from megatron_rl.inference.client import EngineClient, EngineError
from megatron_rl.inference.routing import NoEngine, Router
from megatron_rl.transports.weights.base import WeightTransferError
from megatron_rl.transports.weights.filesystem import acknowledge
from megatron_rl.transports.weights.manifest import Manifest
from megatron_rl.transports.weights.update import Failure, Outcome, Step, Update


class UpdateError(Exception):
    """A version that not every engine holds now; one line per failure, each with engine, step and tensor."""

    def __init__(self, update: Update) -> None:
        self.update = update
        state = "an engine is out of use" if update.outcome is Outcome.BROKEN else "all engines keep the version they had"
        super().__init__(f"weight update to version {update.version} failed, {state}: " + "; ".join(map(str, update.failures)))


class EnginePool:
    """Use within `async with`. No request is sent before the first update: an engine starts on random weights."""

    def __init__(self, urls: Sequence[str], token: str, *, stage_timeout_s: float = 600.0, verify: bool = True) -> None:
        if not urls:
            raise ValueError("a pool needs at least one engine URL")
        self.urls = [url.rstrip("/") for url in urls]
        self.version: int | None = None
        """The version that every engine in use holds; None before the first update."""
        self._token, self._stage_timeout_s, self._verify = token, stage_timeout_s, verify
        self._router = Router(self.urls)
        self._open = asyncio.Event()
        self._updating = asyncio.Lock()
        self._exit = contextlib.AsyncExitStack()
        self.clients: dict[str, EngineClient] = {}

    async def __aenter__(self) -> "EnginePool":
        # Kept alive for less than the server keeps them (VLLM_HTTP_TIMEOUT_KEEP_ALIVE), so that no request meets a closing connection.
        # Without a limit: a flip must get through while every sampling request is frozen and holds its connection.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        session = await self._exit.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        self.clients = {url: EngineClient(url, self._token, session) for url in self.urls}
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._exit.aclose()

    async def wait_ready(self, timeout_s: float, died: Callable[[], str | None] = lambda: None) -> None:
        """Return once every server answers. Raises EngineError."""
        await asyncio.gather(*(client.wait_ready(timeout_s, died) for client in self.clients.values()))

    async def sample(
        self, session_id: str, prompt: list[int], max_tokens: int, temperature: float, seed: int | None = None, cache_salt: str = ""
    ) -> Completion:
        """One answer by the current policy. During an update it waits for the new version. Raises EngineError.

        Prefix caches are salted with the version, so keys and values of old weights are not met by new requests.
        """
        if self._updating.locked():
            await self._open.wait()
        if self.version is None:
            raise EngineError(f"engine {self.urls[0]} holds no verified version: update_weights comes before sample")
        try:
            engine = self._router.acquire(session_id)
        except NoEngine as error:
            raise EngineError(f"no engine is in use: the last weight update broke {', '.join(self.urls)}") from error
        try:
            return await self.clients[engine].generate(prompt, max_tokens, temperature, seed, f"{self.version}:{cache_salt}")
        finally:
            self._router.release(engine)

    async def update_weights(self, version_dir: str | Path) -> dict[str, float]:
        """Bring every engine to the version in `version_dir`, then acknowledge it to the sender. Harmless to repeat.

        Returns seconds by step ("stage", "pause", "flip", "resume", "total"). Requests in flight are frozen from pause to resume and go on
        with the new weights. Raises UpdateError if not every engine holds the version now, WeightTransferError if there is no such version.
        """
        directory = Path(version_dir)
        async with self._updating:
            manifest = Manifest.read(directory)
            update = Update(manifest.version, self.urls, self._stage_timeout_s)
            start = time.monotonic()
            try:
                await self._drive(update, directory)
            finally:
                self._open.set()
            if update.outcome is not Outcome.APPLIED:
                raise UpdateError(update)
            acknowledge(directory, self.urls)
            return {**update.seconds, "total": time.monotonic() - start}

    async def _drive(self, update: Update, directory: Path) -> None:
        """Run the update's actions until it has an outcome."""
        tasks: dict[asyncio.Task[None], tuple[str, Step]] = {}

        def start(actions: list[tuple[str, Step]]) -> None:
            for engine, step in actions:
                if step is Step.PAUSE:
                    self._open.clear()
                tasks[asyncio.create_task(self._act(self.clients[engine], step, update.version, directory))] = (engine, step)

        start(update.begin(time.monotonic()))
        try:
            while update.outcome is None:
                patience = max(0.0, update.deadline - time.monotonic())
                done, _ = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    engine, step = tasks.pop(task)
                    start(self._record(update, engine, step, task))
                start(update.expire(time.monotonic()))
        finally:
            for task in tasks:
                task.cancel()
            self._settle(update)

    def _record(self, update: Update, engine: str, step: Step, task: asyncio.Task[None]) -> list[tuple[str, Step]]:
        try:
            task.result()
        except WeightTransferError as error:
            return update.failed(Failure(engine, step, str(error), error.tensor), time.monotonic())
        except EngineError as error:
            return update.failed(Failure(engine, step, str(error)), time.monotonic())
        return update.succeeded(engine, step, time.monotonic())

    def _settle(self, update: Update) -> None:
        for engine in update.broken:
            self._router.avoid(engine)
        flipped = set(self.urls) - update.broken if update.outcome in (Outcome.APPLIED, Outcome.BROKEN) else set()
        for engine in flipped:
            self._router.use(engine)
        if flipped:
            self.version = update.version

    async def _act(self, client: EngineClient, step: Step, version: int, directory: Path) -> None:
        match step:
            case Step.STAGE:
                await client.stage(version, directory, self._verify)
            case Step.PAUSE:
                await client.pause()
            case Step.FLIP:
                await client.flip(version)
            case Step.RESUME:
                await client.resume()
            case Step.DROP:
                await client.drop_staged()
            case Step.ABORT:
                await client.abort_all()
