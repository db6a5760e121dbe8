"""One rollout's dialogue with the policy: the exact tokens, which of them were sampled, by which weights."""

import math
import time

from megatron_rl.envs.protocol import Completion, Message, Overlong, Sampler
from megatron_rl.envs.rendering import Renderer


class EngineFailure(Exception):
    """The engine, not the environment, failed; the run can't go on."""


class Dialogue:
    """The Conversation given to environments.

    token_ids, sampled, logprobs: one entry per token of the dialogue so far, as the engine saw or sampled it;
    logprobs are 0 where sampled is False. versions: (policy version, start, end) over token_ids, sampled spans only.
    """

    def __init__(self, renderer: Renderer, sampler: Sampler, context: int, max_tokens: int) -> None:
        """context: longest prompt + answer in tokens. max_tokens: longest answer of one turn."""
        self._renderer, self._sampler, self._context, self._max_tokens = renderer, sampler, context, max_tokens
        self._busy = False
        self.token_ids: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, int, int]] = []
        self.messages: list[Message] = []
        self.finish_reason = ""
        self.engine_seconds = 0.0
        self.failure: EngineFailure | None = None
        """Set when the engine failed, so that user code which swallows the exception can't hide it."""

    async def reply(self, messages: list[Message]) -> str:
        """Append `messages`, sample the assistant's turn and return its text.

        An answer may take max_tokens or what is left of the context, whichever is less; one that reaches it has finish
        reason "length". Overlong when nothing is left. EngineFailure when the engine fails.
        """
        if self._busy:
            raise RuntimeError("reply was called while another reply of the same conversation is running; await one after the other")
        renderer = self._renderer
        added = renderer.extend(self.messages, messages, self.token_ids[-1]) if self.token_ids else renderer.prompt(messages)
        prompt = self.token_ids + added
        room = self._context - len(prompt)
        if room < 1:
            raise Overlong(f"the prompt has {len(prompt)} tokens and an answer needs 1 more; the context is {self._context}")
        self._busy = True
        started = time.perf_counter()
        try:
            completion = await self._sampler(prompt, min(self._max_tokens, room))
            check(completion)
        except Exception as error:  # whatever it is, it is not the environment's
            self.failure = error if isinstance(error, EngineFailure) else EngineFailure(f"{type(error).__name__}: {error}")
            raise self.failure from error
        finally:
            self._busy = False
            self.engine_seconds += time.perf_counter() - started
        answer = self._renderer.text(completion.token_ids)
        self._append(added, completion)
        self.messages += [*messages, {"role": "assistant", "content": answer}]
        self.finish_reason = completion.finish_reason
        return answer

    def _append(self, added: list[int], completion: Completion) -> None:
        start = len(self.token_ids) + len(added)
        self.token_ids += [*added, *completion.token_ids]
        self.sampled += [False] * len(added) + [True] * len(completion.token_ids)
        self.logprobs += [0.0] * len(added) + completion.logprobs
        self.versions += [(version, start + a, start + b) for version, a, b in completion.versions]


def check(completion: Completion) -> None:
    """EngineFailure unless there are tokens, each with a finite log-prob and a policy version."""
    n = len(completion.token_ids)
    if n == 0:
        raise EngineFailure("the engine returned no tokens")
    if len(completion.logprobs) != n:
        raise EngineFailure(f"the engine returned {n} tokens and {len(completion.logprobs)} log-probs")
    if not all(map(math.isfinite, completion.logprobs)):
        raise EngineFailure("the engine returned a log-prob that is not finite")
    if completion.finish_reason not in ("stop", "length"):
        raise EngineFailure(f"the engine ended a request with finish reason {completion.finish_reason!r}; stop or length was expected")
    ends = [0, *(end for _, _, end in completion.versions)]
    if [start for _, start, _ in completion.versions] != ends[:-1] or ends[-1] != n:
        raise EngineFailure(f"the engine's version spans {completion.versions} do not cover its {n} tokens")
