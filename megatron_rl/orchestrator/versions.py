"""Watches for the versions the trainer offers and brings the engines to each, in order."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from megatron_rl.evals.rollouts import Pool
from megatron_rl.transports.weights.filesystem import discard_newer, version_dir

log = logging.getLogger(__name__)

POLL_S = 0.02


class VersionWatcher:
    """`version` is None until the first update. It advances once every engine holds the version (and is what rollouts are opened under).

    on_version runs after each update and before the next: before `version` advances if `exclusive` (nothing is to be
    generated meanwhile), else after. `wake` is set when `version` advances.
    """

    def __init__(
        self,
        run_dir: Path,
        pool: Pool,
        *,
        start: int,
        last: int,
        timeout_s: float,
        on_version: Callable[[int], Awaitable[None]],
        exclusive: bool,
        wake: asyncio.Event,
    ) -> None:
        self.version: int | None = None
        self._run_dir, self._pool, self._start, self._last, self._timeout_s = run_dir, pool, start, last, timeout_s
        self._on_version, self._exclusive, self._wake = on_version, exclusive, wake
        self._shipped, self._since = start, time.monotonic()
        for stale in discard_newer(run_dir, start):
            log.warning("removed weights/%d: left by an earlier attempt, this one starts at version %d", stale, start)

    def shipped(self, step: int) -> None:
        """The trainer has what it needs to make version `step`."""
        self._shipped, self._since = step, time.monotonic()

    async def run(self) -> None:
        """Return once the engines hold version `last`. TimeoutError when the trainer does not deliver; UpdateError."""
        for version in range(self._start, self._last + 1):
            directory = version_dir(self._run_dir, version)
            while not directory.is_dir():
                if version <= self._shipped and time.monotonic() - self._since > self._timeout_s:
                    raise TimeoutError(
                        f"no weights version {version} in {directory.parent} after {self._timeout_s:g} s; is the trainer alive?"
                    )
                await asyncio.sleep(POLL_S)
            await self._pool.update_weights(str(directory))
            if self._exclusive:
                await self._on_version(version)
            self.version, self._since = version, time.monotonic()
            self._wake.set()
            if not self._exclusive:
                await self._on_version(version)
                self._since = time.monotonic()
