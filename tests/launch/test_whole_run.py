"""A run that is killed anywhere ends whole, says what died, and goes on from its last complete checkpoint."""

import json
import os
import signal
import time

import pytest
from whole_runs import Launch, prepare

FOREVER = ("--trainer.steps", "100000")


def killed_while_training(place, word, *words):
    """The launch, ended, after SIGKILL to its process `word`, once a checkpoint is complete; and the pid that was killed."""
    launch = Launch(place, *FOREVER, *words)
    launch.until(lambda: (launch.run / "checkpoints" / "step_2" / "COMPLETE").exists())
    victim = launch.process.pid if word == "launcher" else launch.find(word).pid
    launch.members()
    os.kill(victim, signal.SIGKILL)
    launch.process.wait(30)  # the bound that is promised
    deadline = time.monotonic() + 30
    while (left := launch.members()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    return launch, victim


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_killed_engine_ends_the_run_and_a_resume_finishes_it(tmp_path):
    prepare(tmp_path)
    launch, victim = killed_while_training(tmp_path, "EngineCore")
    error = [line for line in launch.console.splitlines() if line.startswith("error: ")]
    assert launch.process.returncode == 1
    assert len(error) == 1
    assert error[0].startswith("error: engine_0 (pid ")
    assert f"after its process VLLM::EngineCore (pid {victim}) died; log: runs/tiny/logs/attempt_1/engine_0.log" in error[0]

    done = max(int(path.parent.name.removeprefix("step_")) for path in launch.run.glob("checkpoints/*/COMPLETE"))
    resumed = Launch(tmp_path, "--resume", "--trainer.steps", str(done + 2))
    assert resumed.wait() == 0, resumed.console
    assert "sft:" not in resumed.console  # the warm-up is in the checkpoint
    steps = [line["step"] for line in resumed.lines() if "loss/total" in line]
    assert steps == list(range(1, done + 3))  # each once, none missing
    summary = json.loads((resumed.run / "summary.json").read_text())
    assert summary["steps"] == done + 2
    assert {"setup", "engine_start", "rl", "eval"} <= set(summary["phases"])
    assert 0 <= summary["eval_before"] <= 1 and 0 <= summary["eval_after"] <= 1
    for file in (f"hf/step_{done + 2}/config.json", "hf/sft/config.json", "plots/overview.png", "configs/attempt_2/resolved.json"):
        assert (resumed.run / file).is_file(), file


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("word", "name"),
    [("megatron_rl.cli trainer", "trainer_0"), ("megatron_rl.cli orchestrator", "orchestrator"), ("megatron_rl.cli inference", "engine_0")],
)
def test_a_killed_process_ends_the_run(tmp_path, word, name):
    prepare(tmp_path)
    launch, victim = killed_while_training(tmp_path, word)
    assert launch.process.returncode == 1
    assert f"error: {name} (pid {victim}) was killed by SIGKILL" in launch.console


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_launcher_leaves_nothing_behind(tmp_path):
    prepare(tmp_path)
    launch, _ = killed_while_training(tmp_path, "launcher")
    assert launch.process.returncode == -signal.SIGKILL


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_rank_among_several_is_the_one_named(tmp_path):
    prepare(tmp_path)
    launch = Launch(tmp_path, *FOREVER, "--trainer.parallel.tensor-parallel", "2")
    launch.until(lambda: len(launch.lines()) > 3)
    ranks = sorted(process.pid for process in launch.members() if "megatron_rl.cli trainer" in process.title)
    os.kill(ranks[1], signal.SIGKILL)
    launch.process.wait(30)
    assert f"error: trainer_1 (pid {ranks[1]}) was killed by SIGKILL" in launch.console


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.timeout(900)
def test_ctrl_c_ends_a_run_cleanly(tmp_path):
    prepare(tmp_path)
    launch = Launch(tmp_path, *FOREVER)
    launch.until(lambda: len(launch.lines()) > 2)
    launch.members()
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(30) == 130
    assert launch.members() == []
    assert "Traceback" not in launch.console
