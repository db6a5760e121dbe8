"""One rollout: exact tokens over turns, and the boundary to user code."""

import asyncio

import pytest
from scripted_policy import byte_tokenizer

from megatron_rl.envs.conversation import EngineFailure
from megatron_rl.envs.protocol import Completion, Environment, Overlong, Reward, Task
from megatron_rl.envs.rendering import Renderer
from megatron_rl.envs.runner import run_episode

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
EOS = TOKENIZER.eos_token_id
TASK = Task("t1", [{"role": "user", "content": "go"}])


class Env(Environment):
    """Runs the function given."""

    def __init__(self, run):
        self._run = run

    def __len__(self):
        return 1

    def task(self, index):
        return TASK

    async def run(self, task, conversation):
        return await self._run(task, conversation)


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def scripted(*answers, versions=None):
    """A sampler that gives the answers in turn, cut at max_tokens; keeps its prompts."""
    queue, prompts = list(answers), []

    async def sample(prompt, max_tokens):
        prompts.append((list(prompt), max_tokens))
        tokens = [*ids(queue.pop(0)), EOS]
        reason = "stop" if len(tokens) <= max_tokens else "length"
        tokens = tokens[:max_tokens]
        return Completion(tokens, [-0.25] * len(tokens), reason, versions or [(3, 0, len(tokens))])

    sample.prompts = prompts
    return sample


def play(env, sampler, context=200, max_tokens=50, timeout_s=5.0):
    return asyncio.run(
        run_episode(
            env, TASK, name="my env", renderer=RENDERER, sampler=sampler, context=context, max_tokens=max_tokens, timeout_s=timeout_s
        )
    )


async def two_turns(task, conversation):
    first = await conversation.reply(task.messages)
    second = await conversation.reply([{"role": "tool", "content": f"you said {first}"}])
    return Reward(float(second == "b"), {"turns": 2})


def test_two_turns_are_the_full_render_with_sampled_tokens_marked():
    sampler = scripted("a", "b", versions=None)
    episode = play(Env(two_turns), sampler)
    assert (
        TOKENIZER.decode(episode.token_ids) == "<|user|>go<|end|>\n<|assistant|>a<|end|>\n<|tool|>you said a<|end|>\n<|assistant|>b<|end|>"
    )
    sampled = episode.token_ids[episode.sampled].tolist()
    assert sampled == [*ids("a"), EOS, *ids("b"), EOS]
    assert episode.logprobs.tolist() == [-0.25 * s for s in episode.sampled]
    assert [(v, TOKENIZER.decode(episode.token_ids[a:b])) for v, a, b in episode.versions] == [(3, "a<|end|>"), (3, "b<|end|>")]
    assert sampler.prompts[1][0] == episode.token_ids.tolist()[:-2]  # the second prompt repeats the first turn's tokens verbatim
    assert (episode.reward, episode.reward_parts, episode.finish_reason) == (1.0, {"turns": 2.0}, "stop")
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_first_turn_cut_by_length_is_closed_unsampled():
    episode = play(Env(two_turns), scripted("abcdef", "b"), max_tokens=3)
    assert TOKENIZER.decode(episode.token_ids).count("abc<|end|>\n<|tool|>you said abc") == 1
    assert TOKENIZER.decode(episode.token_ids[episode.sampled]) == "abcb<|end|>"


def test_versions_of_a_straddled_answer_are_kept_by_span():
    episode = play(Env(two_turns), scripted("a", "b", versions=[(3, 0, 1), (4, 1, 2)]))
    start = episode.token_ids.tolist().index(ids("a")[0])
    assert episode.versions[:2] == [(3, start, start + 1), (4, start + 1, start + 2)]


def test_max_tokens_shrinks_to_the_room_left_and_the_answer_ends_in_length():
    prompt = len(RENDERER.prompt(TASK.messages))
    sampler = scripted("abcdef")

    async def once(task, conversation):
        return float(await conversation.reply(task.messages) == "ab")

    episode = play(Env(once), sampler, context=prompt + 2)
    assert sampler.prompts[0][1] == 2
    assert (episode.finish_reason, episode.reward, len(episode.token_ids)) == ("length", 1.0, prompt + 2)


@pytest.mark.parametrize(("room", "reason"), [(1, "length"), (0, "overlong"), (-3, "overlong")])
def test_a_prompt_that_leaves_no_room_is_overlong_never_cut(room, reason):
    prompt = len(RENDERER.prompt(TASK.messages))

    async def once(task, conversation):
        await conversation.reply(task.messages)
        return 1

    sampler = scripted("abcdef")
    episode = play(Env(once), sampler, context=prompt + room)
    assert episode.finish_reason == reason
    if reason == "overlong":
        assert sampler.prompts == [] and episode.reward == 0.0
        cause = f"the prompt has {prompt} tokens and an answer needs 1 more; the context is {prompt + room}"
        assert episode.error == f"env 'my env', task 't1': {cause}"


def test_an_environment_may_end_a_dialogue_that_got_too_long():
    async def run(task, conversation):
        await conversation.reply(task.messages)
        try:
            await conversation.reply([{"role": "tool", "content": "x" * 500}])
        except Overlong:
            return 0.5

    episode = play(Env(run), scripted("a", "b"))
    assert (episode.finish_reason, episode.reward) == ("stop", 0.5)


@pytest.mark.parametrize(
    ("value", "cause"),
    [(None, "RewardError: the reward is None"), (float("nan"), "RewardError: the reward is nan"), ("1", "not a number")],
)
def test_an_unusable_reward_is_an_error_that_names_env_and_task(value, cause):
    async def run(task, conversation):
        await conversation.reply(task.messages)
        return value

    episode = play(Env(run), scripted("a"))
    assert (episode.finish_reason, episode.reward) == ("error", 0.0)
    assert episode.error.startswith("env 'my env', task 't1': ") and cause in episode.error


def test_exceptions_timeouts_and_silence_of_an_environment():
    async def exits(task, conversation):
        await conversation.reply(task.messages)
        raise SystemExit("no grader")

    async def raises(task, conversation):
        await conversation.reply(task.messages)
        raise ValueError("bad data")

    async def hangs(task, conversation):
        await conversation.reply(task.messages)
        await asyncio.sleep(60)

    async def own_timeout(task, conversation):
        raise TimeoutError("sandbox")

    async def blocks(task, conversation):
        import time

        await conversation.reply(task.messages)
        time.sleep(0.15)
        return 1.0

    async def silent(task, conversation):
        return 1.0

    def ends(run, timeout_s=5.0):
        episode = play(Env(run), scripted("a"), timeout_s=timeout_s)
        assert episode.reward == 0.0
        return episode.finish_reason, episode.error.removeprefix("env 'my env', task 't1': ")

    assert ends(raises) == ("error", "ValueError: bad data")
    assert ends(exits) == ("error", "SystemExit: no grader")
    assert ends(hangs, 0.05) == ("timeout", "no result within 0.05 s")
    assert ends(own_timeout) == ("error", "TimeoutError: sandbox")
    assert ends(blocks, 0.05) == ("timeout", "no result within 0.05 s")
    assert ends(silent) == ("error", "it finished without a reply of the policy")


def test_two_replies_at_once_are_refused():
    async def run(task, conversation):
        await asyncio.gather(conversation.reply(task.messages), conversation.reply(task.messages))
        return 1.0

    async def slow(prompt, max_tokens):
        await asyncio.sleep(0.01)
        return Completion([EOS], [0.0], "stop", [(0, 0, 1)])

    episode = play(Env(run), slow)
    assert episode.finish_reason == "error" and "await one after the other" in episode.error


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion([], [], "stop", []), "no tokens"),
        (Completion([1, 2], [-1.0], "stop", [(0, 0, 2)]), "2 tokens and 1 log-probs"),
        (Completion([1], [float("nan")], "stop", [(0, 0, 1)]), "not finite"),
        (Completion([1], [-1.0], "abort", [(0, 0, 1)]), "finish reason 'abort'"),
        (Completion([1, 2], [-1.0, -1.0], "stop", [(0, 0, 1)]), "do not cover its 2 tokens"),
        (Completion([1, 2], [-1.0, -1.0], "stop", []), "do not cover its 2 tokens"),
        (Completion([1, 2], [-1.0, -1.0], "stop", [(0, 0, 1), (1, 0, 2)]), "do not cover its 2 tokens"),
        (ConnectionError("refused"), "ConnectionError: refused"),
    ],
)
def test_the_engines_faults_are_not_the_environments_even_if_it_swallows_them(completion, message):
    async def swallows(task, conversation):
        try:
            await conversation.reply(task.messages)
        except Exception:
            return 1.0

    async def broken(prompt, max_tokens):
        if isinstance(completion, Exception):
            raise completion
        return completion

    with pytest.raises(EngineFailure, match=message):
        play(Env(swallows), broken)


def test_cancellation_passes_through():
    async def scenario():
        async def hangs(task, conversation):
            await asyncio.sleep(60)

        running = asyncio.create_task(
            run_episode(Env(hangs), TASK, name="e", renderer=RENDERER, sampler=scripted(), context=100, max_tokens=5, timeout_s=60)
        )
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


def test_a_cancelled_error_of_the_environments_own_making_is_an_error_and_a_cancellation_from_outside_ends_the_rollout():
    async def awaits_what_it_cancelled(task, conversation):
        await conversation.reply(task.messages)
        background = asyncio.create_task(asyncio.sleep(60))
        background.cancel()
        await background

    episode = play(Env(awaits_what_it_cancelled), scripted("a"))
    assert (episode.finish_reason, episode.error) == ("error", "env 'my env', task 't1': CancelledError: ")

    async def from_outside():
        async def sleeps(task, conversation):
            await asyncio.sleep(60)

        running = asyncio.create_task(
            run_episode(Env(sleeps), TASK, name="e", renderer=RENDERER, sampler=scripted(), context=9, max_tokens=9, timeout_s=60)
        )
        await asyncio.sleep(0)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(from_outside())
