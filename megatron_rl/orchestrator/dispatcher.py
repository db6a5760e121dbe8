"""Keeps up to max_inflight rollouts running. Each ends exactly once: as a Rollout, or as a counted cancellation."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from megatron_rl.envs.rendering import Renderer
from megatron_rl.evals.rollouts import Pool, derive_seed, run_rollout
from megatron_rl.orchestrator.groups import Group
from megatron_rl.traces.records import Rollout

RunRollout = Callable[[Group, int], Coroutine[Any, Any, Rollout]]
"""(group, index) -> its rollout. An exception is the engine's failure: fatal."""


def with_engines(pool: Pool, renderer: Renderer, context: int, seed: int) -> RunRollout:
    """Rollouts by the engines. The request's seed is a hash of (seed, source, task, group number, index): it depends on no timing."""

    async def run(group: Group, index: int) -> Rollout:
        return await run_rollout(
            pool,
            renderer,
            context,
            group.source,
            group.task,
            group_id=group.id,
            index=index,
            temperature=group.source.sampling.temperature,
            seed=derive_seed(seed, group.source.id, group.task.id, group.draw.number, index),
            cache_salt=str(group.version),
        )

    return run


class Dispatcher:
    """Rollouts start in the order their groups were opened, by index within a group. `wake` is set whenever one ends."""

    def __init__(self, run: RunRollout, max_inflight: int, wake: asyncio.Event) -> None:
        self._run, self._max_inflight, self._wake = run, max_inflight, wake
        self._waiting: deque[tuple[Group, int]] = deque()
        self._running: dict[asyncio.Task[Rollout], tuple[Group, int]] = {}
        self._ended: list[tuple[Group, int, Rollout]] = []
        self._failure: BaseException | None = None
        self.cancelled = 0
        """Rollouts that ended by cancellation so far."""

    @property
    def load(self) -> int:
        """Rollouts that have not ended."""
        return len(self._waiting) + len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether a further group would start at once."""
        return self.load < self._max_inflight

    def open(self, group: Group) -> None:
        self._waiting.extend((group, index) for index in range(group.size))
        self._start()

    def take(self) -> list[tuple[Group, int, Rollout]]:
        """What ended since the last call, in that order. Raises the engine's failure, if there was one."""
        if self._failure is not None:
            raise self._failure
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, group: Group) -> None:
        """End what has not ended of a group; each is counted, at the latest when its task has wound up."""
        kept = deque((g, index) for g, index in self._waiting if g is not group)
        self.cancelled += len(self._waiting) - len(kept)
        self._waiting = kept
        for task, (g, _) in self._running.items():
            if g is group:
                task.cancel()

    async def close(self) -> None:
        """Cancel everything and wait until it has wound up, or for 10 s where user code holds on."""
        for group in {id(g): g for g, _ in (*self._waiting, *self._running.values())}.values():
            self.cancel(group)
        if self._running:
            await asyncio.wait(self._running, timeout=10)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._max_inflight and self._failure is None:
            group, index = self._waiting.popleft()
            task = asyncio.create_task(self._run(group, index), name=f"rollout {group.id}-{index}")
            self._running[task] = (group, index)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Rollout]) -> None:
        group, index = self._running.pop(task)
        if task.cancelled():
            self.cancelled += 1
        elif (error := task.exception()) is not None:
            self._failure = self._failure or error
        else:
            self._ended.append((group, index, task.result()))
        self._start()
        self._wake.set()
