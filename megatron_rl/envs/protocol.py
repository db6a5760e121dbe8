"""What an environment is: tasks, a way to run one with the policy, and a reward.

A user's file defines `load(**options) -> Environment`. The smallest environment:

    class Echo(Environment):
        def __len__(self): return 10
        def task(self, index): return Task(str(index), [{"role": "user", "content": f"say {index}"}], {"answer": str(index)})
        def reward(self, task, answer): return float(answer.strip() == task.data["answer"])

    def load(**options): return Echo()

A multi-turn environment overrides `run` and calls `conversation.reply` as often as it likes.
"""

import abc
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant" | "tool", "content": ...}"""


@dataclass(frozen=True)
class Task:
    """One problem. `id` is unique and stable within its environment; `data` is the environment's own (JSON values)."""

    id: str
    messages: list[Message]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """The reward, and parts of it (or other numbers) to be recorded beside it."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What one engine request sampled. logprobs are of the distribution sampled from (temperature applied)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """"stop" or "length"."""
    versions: list[tuple[int, int, int]]
    """(policy version, start, end) over token_ids: which weights sampled which span."""


class Sampler(Protocol):
    """A request to the policy: token ids in, token ids out."""

    async def __call__(self, prompt: list[int], max_tokens: int) -> Completion: ...


class Overlong(Exception):
    """The prompt leaves no room for an answer in the context. Counted, never cut."""


class Conversation(Protocol):
    """One rollout's dialogue with the policy; keeps the exact token ids the engine saw and sampled."""

    async def reply(self, messages: list[Message]) -> str:
        """Append `messages`, sample the assistant's turn and return its text. Raises Overlong."""
        ...


class Environment(abc.ABC):
    """Tasks by index, and how one is run. Must not block the event loop for long; `run` may await."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of tasks."""

    @abc.abstractmethod
    def task(self, index: int) -> Task:
        """The task at `index`, always the same one."""

    def reward(self, task: Task, answer: str) -> float | Reward:
        """Score of a single-turn answer."""
        raise NotImplementedError(f"{type(self).__name__} defines neither reward nor run")

    async def run(self, task: Task, conversation: Conversation) -> float | Reward:
        """One rollout. The default: one turn, then `reward`."""
        return self.reward(task, await conversation.reply(task.messages))
