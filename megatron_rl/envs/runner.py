"""Runs one task of an environment: whatever user code does, it ends once, as an Episode or by cancellation."""

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from megatron_rl.envs.conversation import Dialogue, EngineFailure
from megatron_rl.envs.protocol import Environment, Message, Overlong, Reward, Sampler, Task
from megatron_rl.envs.rendering import Renderer
from megatron_rl.envs.rewards import to_reward


@dataclass(frozen=True)
class Episode:
    """How one run of a task went; fields as in traces.records.Rollout, which adds whose it was."""

    token_ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: list[tuple[int, int, int]]
    reward: float
    finish_reason: str
    reward_parts: dict[str, float]
    messages: list[Message]
    error: str
    timings: dict[str, float]


async def run_episode(
    env: Environment,
    task: Task,
    *,
    name: str,
    renderer: Renderer,
    sampler: Sampler,
    context: int,
    max_tokens: int,
    timeout_s: float,
) -> Episode:
    """Run `task` once. finish_reason: stop, length (of the last turn), overlong, timeout or error; the latter three have reward 0.

    An exception or an unusable reward of the environment `name` is finish reason error, its text names the environment, the
    task and the cause. timeout_s: wall seconds of the whole run, the engine's time included. Raises EngineFailure only.
    """
    dialogue = Dialogue(renderer, sampler, context, max_tokens)
    where = f"env {name!r}, task {task.id!r}"
    reward, finish_reason, error = Reward(0.0), "", ""
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            reward = to_reward(await env.run(task, dialogue))
        finish_reason = dialogue.finish_reason
        if not finish_reason:
            finish_reason, error = "error", f"{where}: it finished without a reply of the policy"
        elif time.perf_counter() - started > timeout_s:  # it held the event loop, so the deadline could not interrupt it
            finish_reason, error = "timeout", f"{where}: no result within {timeout_s:g} s"
    except Overlong as reason:
        finish_reason, error = "overlong", f"{where}: {reason}"
    except (Exception, SystemExit, asyncio.CancelledError) as reason:  # user code may raise anything
        if isinstance(reason, asyncio.CancelledError) and (ours := asyncio.current_task()) and ours.cancelling():
            raise
        if isinstance(reason, TimeoutError) and deadline.expired():
            finish_reason, error = "timeout", f"{where}: no result within {timeout_s:g} s"
        else:
            finish_reason, error = "error", f"{where}: {type(reason).__name__}: {reason}"
    if dialogue.failure is not None:
        raise EngineFailure(f"{where}: {dialogue.failure}") from dialogue.failure
    usable = finish_reason in ("stop", "length")
    return Episode(
        token_ids=np.array(dialogue.token_ids, np.int32),
        sampled=np.array(dialogue.sampled, bool),
        logprobs=np.array(dialogue.logprobs, np.float32),
        versions=dialogue.versions,
        reward=reward.value if usable else 0.0,
        finish_reason=finish_reason,
        reward_parts=reward.parts if usable else {},
        messages=dialogue.messages,
        error=error,
        timings={"total": time.perf_counter() - started, "engine": dialogue.engine_seconds},
    )
