"""The whole orchestrator against a scripted policy and trainer: constant batches, bounds, resume, evaluation."""

import asyncio
import json
import random
from itertools import pairwise
from pathlib import Path

import msgpack
import numpy as np
import pytest
from scripted_policy import Guess, ScriptedPool, ScriptedTrainer, save_tokenizer

from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import RLConfig
from megatron_rl.envs.conversation import EngineFailure
from megatron_rl.orchestrator.dispatcher import Dispatcher
from megatron_rl.orchestrator.orchestrator import run
from megatron_rl.traces.stream import read
from megatron_rl.transports.batches.filesystem import read_batch

ENV = """
from scripted_policy import Guess
def load(**options):
    return Guess(**options)
"""


@pytest.fixture
def config(tmp_path):
    """A function: overrides -> RLConfig."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "env.py").write_text(ENV)

    def make(steps=4, source=(), **top):
        env = {"path": str(tmp_path / "env.py")}
        return RLConfig.model_validate(
            {
                "run": {"name": "r", "root": str(tmp_path)},
                "model": {"path": tokenizer, "context": 64},
                "trainer": {"steps": steps, "micro_batch_tokens": 128, "parallel": {"data_parallel": 2}},
                "orchestrator": {"batch_size": 16, "max_inflight": 24, **top.pop("orchestrator", {})},
                "train": {
                    "group_size": 4,
                    "sampling": {"max_tokens": 16},
                    "source": source or [{"id": "guess", "env": env}],
                },
                **top,
            }
        )

    return make


def guesses(prompt, seed):
    """Right half of the time; task 7 always, so its group is flat."""
    digit = prompt.split("guess ")[1].split("<")[0]
    right = digit.endswith("7") or random.Random(seed).random() < 0.5
    return digit[-1] if right else "?"


def play(config, pool, *, start=0, state=None, delay=1):
    trainer = ScriptedTrainer(config.run.dir, start, delay)
    asyncio.run(asyncio.wait_for(run(config, pool, trainer, config.run.dir, state, start), 50))
    return trainer.batches


def sample_ids(batch):
    return [name for m in batch.micro_batches for name in m.sample_ids]


def metrics(config):
    return [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]


def traces(config):
    return list(read(Path(config.run.dir) / "traces" / "stream.jsonl"))


def test_every_batch_has_batch_size_rollouts_though_groups_are_filtered(config):
    batches = play(config(), ScriptedPool(guesses, jitter=20))
    assert [b.step for b in batches] == [1, 2, 3, 4]
    assert [len(sample_ids(b)) for b in batches] == [16] * 4
    assert sum(b.metrics["groups/filtered"] for b in batches) > 0
    assert len({name for b in batches for name in sample_ids(b)}) == 64
    assert all(len(b.micro_batches) % 2 == 0 for b in batches)


def test_streams_and_metrics_say_what_happened(config):
    cfg = config(steps=1, orchestrator={"filter_zero_advantage": False})
    (batch,) = play(cfg, ScriptedPool(guesses))
    rows = [row for row in traces(cfg) if row["fate"] == "shipped"]
    rewards = np.array([row["reward"] for row in rows])
    assert batch.metrics["reward/mean"] == pytest.approx(rewards.mean())
    assert batch.metrics["reward/std"] == pytest.approx(rewards.std())
    assert batch.metrics["reward/guess/mean"] == batch.metrics["reward/mean"]
    assert batch.metrics["rollouts/trained"] == 16 and batch.metrics["groups/trained"] == 4
    assert batch.micro_batches[0].denominators == {"rl": 32.0}  # 16 answers of one character and the end-of-turn token
    by_id = {row["rollout_id"]: row for row in rows}
    for m in batch.micro_batches:
        for i, name in enumerate(m.sample_ids):
            span = slice(m.cu_seqlens[i], m.cu_seqlens[i + 1])
            row = by_id[name]
            assert m.streams["token_ids"][span].tolist() == row["token_ids"]
            assert m.streams["loss_mask"][span].tolist() == [bool(x) for x in row["sampled"]]
            assert m.streams["inference_logprobs"][span].tolist() == [-0.5 * x for x in row["sampled"]]
            assert m.streams["advantages"][span].tolist() == [np.float32(row["advantage"]) * x for x in row["sampled"]]
            assert m.streams["temperatures"][span].tolist() == [1.0] * len(row["token_ids"])
    for group in {row["group_id"] for row in rows}:
        members = [row for row in rows if row["group_id"] == group]
        mean = np.mean([row["reward"] for row in members])
        assert [row["advantage"] for row in members] == pytest.approx([row["reward"] - mean for row in members])


def test_one_step_of_overlap_and_none_without_lag(config):
    """lag 1: batch n + 1 is generated with the weights that batch n trains from; lag 0: never."""
    overlapped = play(config(steps=6), ScriptedPool(guesses, jitter=5), delay=30)
    assert [b.metrics["staleness/max"] for b in overlapped[1:]] == [1] * 5
    synchronous = play(
        config(steps=6, orchestrator={"lag": 0}, run={"name": "s", "root": config().run.root}), ScriptedPool(guesses, jitter=5)
    )
    assert [b.metrics["staleness/max"] for b in synchronous] == [0] * 6
    assert [b.policy_version for b in synchronous] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_ships_a_token_staler_than_the_bound(config, seed):
    rng = random.Random(seed)
    limit, lag = rng.randint(0, 3), rng.randint(0, 3)
    cfg = config(steps=8, orchestrator={"lag": lag, "max_off_policy_steps": limit, "max_inflight": rng.choice([4, 13, 40])})

    async def slow_sometimes(prompt, draw):
        await asyncio.sleep(0.02 if draw % 10 == 0 else 0)
        return guesses(prompt, draw)

    batches = play(cfg, ScriptedPool(slow_sometimes, jitter=30, seed=seed), delay=rng.randint(0, 3))
    shipped = {name: b.step for b in batches for name in sample_ids(b)}
    assert [len(sample_ids(b)) for b in batches] == [16] * 8
    rows = {row["rollout_id"]: row for row in traces(cfg)}
    ages = {name: step - 1 - min(v for v, _, _ in rows[name]["versions"]) for name, step in shipped.items()}
    assert set(ages.values()) <= set(range(limit + 1))
    assert [b.metrics["staleness/max"] for b in batches] == [max(ages[n] for n in sample_ids(b)) for b in batches]
    assert len(rows) == len(traces(cfg))  # every rollout is traced once


def test_deterministic_batches_do_not_depend_on_completion_order(config):
    runs = []
    for jitter in (0, 40):
        cfg = config(deterministic=True, run={"name": f"d{jitter}", "root": config().run.root})
        pool = ScriptedPool(guesses, jitter=jitter, seed=jitter)
        runs.append(([sample_ids(b) for b in play(cfg, pool)], [r["seed"] for r in pool.requests], cfg))
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == runs[1][1]  # the same requests, in the same order
    for ids in runs[0][0]:
        numbers = [int(name.split("-")[1]) for name in ids]
        assert numbers == sorted(numbers)
    assert sample_ids(read_batch(Path(runs[0][2].run.dir) / "batches", 3)) == runs[0][0][2]


def test_deterministic_batches_of_unequal_groups_do_not_depend_on_completion_order(config, tmp_path):
    """A group of 8 that completes before one of 4 would fill the batch of 8 alone."""
    env = {"path": str(tmp_path / "env.py")}
    sources = [
        {"id": "small", "env": env, "group_size": 4, "select": {"limit": 10}},
        {"id": "large", "env": env, "group_size": 8, "select": {"skip": 10}},
    ]

    async def small_last(prompt, seed):
        if len(prompt.split("guess ")[1].split("<")[0]) == 1:  # tasks 0 ... 9
            await asyncio.sleep(0.005)
        return guesses(prompt, seed)

    runs = []
    for name, answer in (("even", guesses), ("late", small_last)):
        limits = {"batch_size": 8, "filter_zero_advantage": False}
        cfg = config(steps=6, deterministic=True, source=sources, orchestrator=limits, run={"name": name, "root": config().run.root})
        runs.append([sample_ids(b) for b in play(cfg, ScriptedPool(answer))])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("at", [1, 3])
def test_a_resumed_deterministic_run_makes_the_batches_it_would_have_made(config, at):
    whole = play(config(steps=5, deterministic=True), ScriptedPool(guesses, jitter=9))
    resumed = play(
        config(steps=5, deterministic=True, run={"name": "again", "root": config().run.root}),
        ScriptedPool(guesses, jitter=3),
        start=at,
        state=whole[at - 1].orchestrator_state,
    )
    assert [sample_ids(b) for b in resumed] == [sample_ids(b) for b in whole[at:]]
    assert [b.orchestrator_state for b in resumed] == [b.orchestrator_state for b in whole[at:]]


def test_groups_in_flight_at_a_checkpoint_are_dispatched_again_on_resume(config):
    """No group is lost and none is trained twice, wherever an asynchronous run is cut."""
    first = play(config(steps=3), ScriptedPool(guesses, jitter=30))
    state = msgpack.unpackb(first[1].orchestrator_state)
    settled = {n for n in range(state["tasks"]["drawn"])} - {number for number, _, _ in state["tasks"]["open"]}
    pool = ScriptedPool(guesses, jitter=30)
    cfg = config(steps=6, run={"name": "again", "root": config().run.root})
    second = play(cfg, pool, start=2, state=first[1].orchestrator_state)
    shipped = [{int(name.split("-")[1]) for b in part for name in sample_ids(b)} for part in (first[:2], second)]
    assert shipped[0] <= settled and not shipped[1] & settled
    numbers = [int(r["session"].split("-")[1]) for r in pool.requests][::4]
    open_numbers = [number for number, _, _ in state["tasks"]["open"]]
    assert numbers[: len(open_numbers)] == open_numbers  # first, in their order
    assert len(set(numbers)) == len(numbers)
    assert set(range(max(numbers) + 1)) - settled == set(numbers)


def test_inflight_rollouts_stay_within_the_limit_and_use_it(config):
    pool = ScriptedPool(guesses, jitter=20)
    play(config(orchestrator={"max_inflight": 10}), pool)
    assert pool.most_inflight == 10


def test_cache_salt_is_the_version_at_the_groups_start_and_the_session_its_group(config):
    pool = ScriptedPool(guesses)
    play(config(orchestrator={"lag": 0}), pool)
    salts = {}
    for request in pool.requests:
        salts.setdefault(request["session"], set()).add(request["salt"])
    assert all(len(s) == 1 for s in salts.values())
    assert {next(iter(s)) for s in salts.values()} == {"0", "1", "2", "3"}
    assert len({r["seed"] for r in pool.requests}) == len(pool.requests)


def test_failing_rollouts_shrink_their_group_and_are_counted(config, tmp_path):
    (tmp_path / "flaky.py").write_text(
        "from scripted_policy import Guess\n"
        "class Flaky(Guess):\n"
        "    def reward(self, task, answer):\n"
        "        if answer == '!': raise KeyError('no answer')\n"
        "        return super().reward(task, answer)\n"
        "def load(): return Flaky()\n"
    )
    cfg = config(source=[{"id": "flaky", "env": {"path": str(tmp_path / "flaky.py")}}])
    batches = play(cfg, ScriptedPool(lambda p, s: "!" if s % 5 == 0 else guesses(p, s), jitter=9))
    assert [len(sample_ids(b)) for b in batches] == [16] * 4
    assert sum(b.metrics["rollouts/error"] for b in batches) > 0
    failed = [row for row in traces(cfg) if row["fate"] == "error"]
    assert all("flaky.py', task 'guess-" in row["error"] and "KeyError: 'no answer'" in row["error"] for row in failed)


def test_a_run_of_errors_ends_with_the_last_one(config, tmp_path):
    (tmp_path / "broken.py").write_text(
        "from scripted_policy import Guess\n"
        "class Broken(Guess):\n"
        "    def reward(self, task, answer): return None\n"
        "def load(): return Broken()\n"
    )
    cfg = config(source=[{"id": "b", "env": {"path": str(tmp_path / "broken.py")}}], orchestrator={"max_consecutive_errors": 9})
    with pytest.raises(ConfigError, match=r"9 rollouts in a row .*broken.py', task 'guess-\d+': RewardError: the reward is None"):
        play(cfg, ScriptedPool(guesses))


def test_a_solved_task_ends_the_run_with_the_numbers(config):
    cfg = config(orchestrator={"max_filtered_groups": 5})
    with pytest.raises(
        ConfigError, match=r"batch 1: 5 groups were filtered \(zero_advantage 5, unusable 0; mean reward 0; rollouts ended: stop 20\)"
    ):
        play(cfg, ScriptedPool(lambda p, s: "?"))


def test_prompts_beyond_the_context_are_overlong_and_never_cut(config):
    cfg = config(model={"path": config().model.path, "context": 8}, orchestrator={"max_filtered_groups": 3})
    with pytest.raises(ConfigError, match=r"unusable 3; no reward; rollouts ended: overlong 12"):
        play(cfg, ScriptedPool(guesses))


def test_an_engine_failure_is_fatal_and_keeps_its_message(config):
    def fail(prompt, seed):
        raise ConnectionError("engine http://127.0.0.1:1 refused the request")

    with pytest.raises(EngineFailure, match=r"ConnectionError: engine http://127.0.0.1:1 refused the request"):
        play(config(), ScriptedPool(fail))


def test_evaluation_lines_and_traces(config, tmp_path):
    held = [{"id": "held", "env": {"path": str(tmp_path / "env.py")}, "select": {"skip": 30}}]
    cfg = config(steps=5, eval={"interval": 2, "source": held})
    play(cfg, ScriptedPool(lambda p, s: "7" if "guess 3" in p else guesses(p, s)))
    lines = metrics(cfg)
    assert [line["step"] for line in lines] == [0, 2, 4, 5]
    assert all(line["eval/held/exact_match"] == 0.1 for line in lines)  # 30 ... 39, of which 37 asks for a 7
    assert all(line["time/eval"] > 0 for line in lines)
    rows = [row for row in traces(cfg) if row["kind"] == "eval"]
    assert len(rows) == 40 and {row["temperature"] for row in rows} == {0.0}


def test_an_evaluation_is_not_repeated_on_resume(config, tmp_path):
    held = [{"id": "held", "env": {"path": str(tmp_path / "env.py")}, "select": {"limit": 3}}]
    cfg = config(steps=2, eval={"interval": 1, "source": held})
    state = play(cfg, ScriptedPool(guesses))[1].orchestrator_state
    longer = config(steps=3, eval={"interval": 1, "source": held})
    play(longer, ScriptedPool(guesses), start=2, state=state)
    assert [line["step"] for line in metrics(cfg)] == [0, 1, 2, 3]


def test_a_trainer_that_delivers_no_weights_is_named(config):
    cfg = config(orchestrator={"batch_timeout_s": 0.3})
    with pytest.raises(TimeoutError, match=r"no weights version 1 in .*weights after 0.3 s; is the trainer alive"):
        play(cfg, ScriptedPool(guesses), delay=10**6)


def test_weights_left_by_an_earlier_attempt_are_not_taken(config, tmp_path):
    cfg = config()
    trainer = ScriptedTrainer(cfg.run.dir, delay=1)
    (tmp_path / "r" / "weights" / "2").mkdir()  # the trainer would fail to make it again
    asyncio.run(asyncio.wait_for(run(cfg, ScriptedPool(guesses), trainer, cfg.run.dir), 30))
    assert [b.step for b in trainer.batches] == [1, 2, 3, 4]


def test_a_context_that_no_micro_batch_holds_is_refused(config):
    cfg = config(model={"path": config().model.path, "context": 129})
    with pytest.raises(ConfigError, match=r"model.context = 129 exceeds trainer.micro_batch_tokens = 128"):
        play(cfg, ScriptedPool(guesses))


def test_two_sources_are_mixed_by_ratio(config, tmp_path):
    env = {"path": str(tmp_path / "env.py")}
    cfg = config(steps=12, source=[{"id": "a", "env": env, "ratio": 3}, {"id": "b", "env": env, "ratio": 1}])
    pool = ScriptedPool(guesses)
    play(cfg, pool)
    groups = [r["session"].split("-")[0] for r in pool.requests][::4]
    assert 0.6 < groups.count("a") / len(groups) < 0.9
    assert Guess().task(3).id == "guess-3"


def test_a_group_in_flight_that_got_too_stale_is_cancelled_and_the_run_goes_on(config):
    async def first_group_hangs(prompt, seed):
        if len(pool.requests) <= 4:
            await asyncio.sleep(60)
        return guesses(prompt, seed)

    cfg = config(steps=6, orchestrator={"max_off_policy_steps": 2})
    pool = ScriptedPool(first_group_hangs)
    batches = play(cfg, pool)
    assert [len(sample_ids(b)) for b in batches] == [16] * 6
    hung = {r["session"] for r in pool.requests[:4]}
    assert hung == {"guess-0"} and not any(name.startswith("guess-0-") for b in batches for name in sample_ids(b))
    # opened under version 0: too stale for batch 4, whose tokens may be of version 1 or later
    assert [b.metrics["groups/stale"] for b in batches] == [0, 0, 0, 1, 0, 0]
    assert sum(b.metrics["rollouts/cancelled"] for b in batches) == 4


def test_nothing_is_generated_during_an_evaluation_of_a_deterministic_run(config, tmp_path):
    held = [{"id": "held", "env": {"path": str(tmp_path / "env.py")}, "select": {"limit": 5}}]
    pool = ScriptedPool(guesses, jitter=15)
    play(config(deterministic=True, eval={"interval": 1, "source": held}), pool)
    kinds = ["eval" if r["session"].startswith("eval-") else "train" for r in pool.requests]
    runs = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert runs == ["eval", "train"] * 4 + ["eval"]


def test_a_deterministic_run_starts_requests_only_when_all_before_have_ended(config, monkeypatch):
    """What is in flight together must not depend on timing: an engine's rounding may depend on it."""
    loads = []

    def open_recorded(self, group):
        loads.append(self.load)
        original(self, group)

    original = Dispatcher.open
    monkeypatch.setattr(Dispatcher, "open", open_recorded)
    play(config(deterministic=True, orchestrator={"max_inflight": 10}), ScriptedPool(guesses, jitter=25))
    assert all(load == 0 or load == before + 4 for before, load in pairwise(loads))
    assert max(loads) == 8


def test_a_rollout_beyond_its_deadline_is_a_timeout_and_leaves_its_group(config, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import asyncio\n"
        "from scripted_policy import Guess\n"
        "class Slow(Guess):\n"
        "    async def run(self, task, conversation):\n"
        "        answer = await conversation.reply(task.messages)\n"
        "        if answer == '!': await asyncio.sleep(60)\n"
        "        return self.reward(task, answer)\n"
        "def load(): return Slow()\n"
    )
    cfg = config(steps=2, source=[{"id": "slow", "env": {"path": str(tmp_path / "slow.py"), "timeout_s": 0.1}}])
    batches = play(cfg, ScriptedPool(lambda p, s: "!" if s % 6 == 0 else guesses(p, s), jitter=9))
    assert [len(sample_ids(b)) for b in batches] == [16, 16]
    late = [row for row in traces(cfg) if row["fate"] == "timeout"]
    assert late and sum(b.metrics["rollouts/timeout"] for b in batches) <= len(late)
    assert all(row["error"].endswith("no result within 0.1 s") and row["reward"] == 0.0 for row in late)
