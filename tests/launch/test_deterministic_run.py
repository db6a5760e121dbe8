"""A deterministic run: trainer and engine agree after every update, batches replay at another layout, transformers loads the export."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from whole_runs import Launch, prepare

from megatron_rl.traces.stream import read

STEPS = 3
DETERMINISTIC = ("--deterministic", "--orchestrator.lag", "0", "--trainer.steps", str(STEPS), "--trainer.optim.lr", "1e-3")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The run's place and its metrics lines, by step; lr is high enough for each update to matter."""
    place = tmp_path_factory.mktemp("deterministic")
    prepare(place)
    launch = Launch(place, *DETERMINISTIC)
    assert launch.wait() == 0, launch.console
    return place, launch, {line["step"]: line for line in launch.lines() if "loss/total" in line}


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_trainer_and_engine_agree_after_every_update(finished):
    _, _, steps = finished
    assert sorted(steps) == [1, 2, 3]
    for step, line in steps.items():
        assert line["logprob_diff/max"] < 1e-4, step
        assert line["staleness/max"] == 0 and line["policy_version"] == step - 1
        assert line["grad_norm"] > 1e-3  # weights did move


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_dumped_batch_replays_at_another_layout(finished):
    place, launch, steps = finished
    words = ("--run.name", "replayed", "--sft", "none", "--model.path", "runs/tiny/hf/sft", "--model.tokenizer", "model")
    words += ("--trainer.replay", "runs/tiny/batches", "--trainer.steps", "1", "--trainer.parallel.tensor-parallel", "2")
    replay = Launch(place, *DETERMINISTIC, *words)
    assert replay.wait() == 0, replay.console
    (line,) = [json.loads(row) for row in (place / "runs/replayed/metrics.jsonl").read_text().splitlines()]
    for key in ("loss/total", "grad_norm"):
        assert line[key] == pytest.approx(steps[1][key], rel=1e-5), key
    assert sorted(path.name for path in (launch.run / "batches").iterdir()) == ["step_1.batch", "step_2.batch", "step_3.batch"]


@pytest.mark.engine
def test_transformers_gives_the_log_probs_of_the_last_evaluation(finished):
    """The export is what the engine held at the end: greedy answers of the final evaluation, token by token."""
    _, launch, _ = finished
    model = AutoModelForCausalLM.from_pretrained(launch.run / "hf" / f"step_{STEPS}", dtype=torch.float32).eval()
    rows = [row for row in read(launch.run / "traces" / "stream.jsonl") if row["kind"] == "eval" and row["step"] == STEPS]
    assert len(rows) == 4
    for row in rows:
        tokens, sampled = torch.tensor(row["token_ids"]), torch.tensor(row["sampled"], dtype=torch.bool)
        with torch.no_grad():
            predicted = model(tokens[None]).logits[0, :-1].argmax(-1)
        assert torch.equal(predicted[sampled[1:]], tokens[1:][sampled[1:]])
