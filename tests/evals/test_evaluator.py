import asyncio
import json

import pytest
from scripted_policy import ScriptedPool, byte_tokenizer, save_tokenizer

from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import EvalRunConfig
from megatron_rl.config.sources import EvalSourcesConfig
from megatron_rl.envs.conversation import EngineFailure
from megatron_rl.envs.rendering import Renderer
from megatron_rl.envs.sources import load_sources
from megatron_rl.evals import evaluator
from megatron_rl.traces.stream import read

ENV = """
import asyncio
from scripted_policy import Guess
class Env(Guess):
    async def run(self, task, conversation):
        answer = await conversation.reply(task.messages)
        if answer == "sleep": await asyncio.sleep(60)
        if answer == "fail": raise ValueError("failed")
        if answer == "half": return 0.999
        return self.reward(task, answer)
def load(**options): return Env(**options)
"""


@pytest.fixture
def table(tmp_path):
    (tmp_path / "env.py").write_text(ENV)

    def make(tasks=4, **eval_):
        env = {"path": str(tmp_path / "env.py"), "options": {"tasks": tasks}, "timeout_s": 2.0}
        return EvalSourcesConfig.model_validate({"source": [{"id": "g", "env": env}], **eval_})

    return make


def evaluate(table, answer, max_inflight=5):
    pool = ScriptedPool(answer, version=7)
    metrics = asyncio.run(
        evaluator.evaluate(load_sources(table), pool, Renderer(byte_tokenizer()), context=100, seed=0, max_inflight=max_inflight, step=7)
    )
    assert metrics.pop("time/eval") > 0
    return metrics, pool


def task_of(prompt):
    return int(prompt.split("guess ")[1].split("<")[0])


def test_exact_match_is_the_share_of_greedy_rewards_of_exactly_one(table):
    answers = {0: "0", 1: "half", 2: "2", 3: "x"}
    metrics, pool = evaluate(table(), lambda prompt, seed: answers[task_of(prompt)])
    assert metrics == {"eval/g/exact_match": 0.5, "eval/g/reward": pytest.approx((1 + 0.999 + 1 + 0) / 4)}
    assert [r["temperature"] for r in pool.requests] == [0.0] * 4


def test_timeouts_and_errors_are_wrong_and_counted(table):
    answers = {0: "0", 1: "sleep", 2: "fail", 3: "fail"}
    metrics, _ = evaluate(table(), lambda prompt, seed: answers[task_of(prompt)])
    assert metrics == {"eval/g/exact_match": 0.25, "eval/g/reward": 0.25, "eval/g/timeout": 1, "eval/g/error": 2}


def test_pass_at_k_comes_from_the_samples_and_exact_match_from_the_greedy_answer(table):
    """Task 0: its greedy answer is wrong, 1 of 4 samples right; task 1: greedy right, no sample right."""
    asked = {0: 0, 1: 0}

    class Pool(ScriptedPool):
        async def sample(self, **request):
            task = task_of(self.tokenizer.decode(request["prompt"]))
            if request["temperature"] == 0.0:
                self.answer = lambda p, s: "1" if task == 1 else "x"
            else:
                asked[task] += 1
                first = asked[task] == 1
                self.answer = lambda p, s: "0" if task == 0 and first else "x"
            return await super().sample(**request)

    pool = Pool(None, version=0)
    sources = load_sources(table(tasks=2, group_size=4, sampling={"temperature": 0.7}))
    run = evaluator.evaluate(sources, pool, Renderer(byte_tokenizer()), context=100, seed=0, max_inflight=3, step=0)
    metrics = asyncio.run(run)
    assert asked == {0: 4, 1: 4}
    assert metrics["eval/g/exact_match"] == 0.5
    # pass@k of 1 right in 4: k/4; of 0 in 4: 0
    assert [metrics[f"eval/g/pass@{k}"] for k in (1, 2, 4)] == [0.125, 0.25, 0.5]
    assert "eval/g/pass@3" not in metrics
    assert {r["temperature"] for r in pool.requests} == {0.0, 0.7}
    assert len({r["seed"] for r in pool.requests}) == 10


def test_requests_in_flight_are_bounded(table):
    pool = ScriptedPool(lambda p, s: "x", jitter=10, version=0)
    sources = load_sources(table(tasks=40))
    asyncio.run(evaluator.evaluate(sources, pool, Renderer(byte_tokenizer()), context=100, seed=0, max_inflight=6, step=0))
    assert pool.most_inflight == 6


def test_several_samples_at_temperature_zero_are_refused(table):
    with pytest.raises(ConfigError, match="eval source 'g': group_size = 4 at temperature 0"):
        evaluate(table(group_size=4), lambda p, s: "x")


def test_an_engine_failure_ends_the_evaluation(table):
    def fail(prompt, seed):
        raise ConnectionError("refused")

    with pytest.raises(EngineFailure, match="refused"):
        evaluate(table(), fail)


def test_the_command_writes_the_line_and_the_traces(table, tmp_path):
    config = EvalRunConfig.model_validate(
        {
            "run": {"name": "e", "root": str(tmp_path)},
            "model": {"path": save_tokenizer(tmp_path / "tokenizer"), "context": 100},
            "eval": table().model_dump(),
        }
    )
    run_dir = tmp_path / "e"
    run_dir.mkdir()
    metrics = asyncio.run(evaluator.run(config, ScriptedPool(lambda p, s: "2", version=0), run_dir))
    assert metrics["eval/g/exact_match"] == 0.25
    assert json.loads((run_dir / "metrics.jsonl").read_text()) == {"step": 0, **metrics}
    rows = list(read(run_dir / "traces" / "stream.jsonl"))
    assert sorted(row["rollout_id"] for row in rows) == [f"eval-0-g-{i}-greedy-0" for i in range(4)]
    assert {(row["kind"], row["fate"], row["step"]) for row in rows} == {("eval", "greedy", 0)}
