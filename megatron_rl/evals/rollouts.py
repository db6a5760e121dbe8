"""One rollout with the engines: shared by training and evaluation."""

from typing import Protocol

import xxhash

from megatron_rl.envs.protocol import Completion, Task
from megatron_rl.envs.rendering import Renderer
from megatron_rl.envs.runner import run_episode
from megatron_rl.envs.sources import Source
from megatron_rl.traces.records import Rollout


class Pool(Protocol):
    """All engines, as one policy."""

    @property
    def version(self) -> int | None:
        """The version every engine holds; None before the first update."""
        ...

    async def sample(
        self, session_id: str, prompt: list[int], max_tokens: int, temperature: float, seed: int | None, cache_salt: str
    ) -> Completion: ...

    async def update_weights(self, version_dir: str) -> object:
        """Return once all engines hold the version in `version_dir`."""
        ...


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else."""
    return xxhash.xxh3_64_intdigest("\x1f".join(map(str, parts)).encode()) >> 1


class EngineSampler:
    """The Sampler of one rollout: its requests share a session (prefix reuse) and differ in their seeds by turn."""

    def __init__(self, pool: Pool, session_id: str, temperature: float, seed: int, cache_salt: str) -> None:
        self._pool, self._session_id, self._temperature, self._cache_salt = pool, session_id, temperature, cache_salt
        self._seed, self._turn = seed, 0

    async def __call__(self, prompt: list[int], max_tokens: int) -> Completion:
        seed = derive_seed(self._seed, self._turn)
        self._turn += 1
        return await self._pool.sample(
            session_id=self._session_id,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=self._temperature,
            seed=seed,
            cache_salt=self._cache_salt,
        )


async def run_rollout(
    pool: Pool,
    renderer: Renderer,
    context: int,
    source: Source,
    task: Task,
    *,
    group_id: str,
    index: int,
    temperature: float,
    seed: int,
    cache_salt: str,
) -> Rollout:
    """Rollout `index` of a group. Ends as a Rollout whatever the environment does; raises EngineFailure only."""
    episode = await run_episode(
        source.env,
        task,
        name=source.env_name,
        renderer=renderer,
        sampler=EngineSampler(pool, group_id, temperature, seed, cache_salt),
        context=context,
        max_tokens=source.sampling.max_tokens,
        timeout_s=source.timeout_s,
    )
    return Rollout(
        rollout_id=f"{group_id}-{index}",
        source=source.id,
        task_id=task.id,
        group_id=group_id,
        temperature=temperature,
        **vars(episode),
    )
