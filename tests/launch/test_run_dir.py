"""A used run directory is never overwritten by accident, and a resume starts from a complete checkpoint only."""

import json
import multiprocessing
from pathlib import Path

import pytest

from megatron_rl.config.base import ConfigError
from megatron_rl.config.run import ResumeConfig, RLConfig, RunConfig, SftRunConfig
from megatron_rl.launch import run_dir

FRESH, RESUME = ResumeConfig(), ResumeConfig(enabled=True)


@pytest.fixture
def run(tmp_path):
    return RunConfig(name="first", root=str(tmp_path / "runs"))


def start(run, resume=FRESH):
    """Open the directory as one launch of `rl` does, and end the launch."""
    source = {"id": "a", "env": {"name": "reasoning_gym"}}
    config = RLConfig.model_validate(
        {
            "run": run.model_dump(),
            "model": {"path": "m"},
            "train": {"source": [source]},
            "sft": {"data": "rows.jsonl"},
            "resume": resume.model_dump(),
        }
    )
    opened = run_dir.open_run(config, run, resume, ["rl", "@", "a file.toml"])
    opened.lock.close()
    return opened


def checkpoint(opened, step, complete=True):
    path = opened.path / "checkpoints" / f"step_{step}"
    (path / "trainer").mkdir(parents=True)
    if complete:
        (path / "COMPLETE").write_text(f"{step}\n")


def test_an_attempt_keeps_the_command_and_the_resolved_config(run):
    opened = start(run)
    assert opened.attempt == 1
    assert (opened.path / "configs" / "latest" / "command.txt").read_text() == "rl @ 'a file.toml'\n"
    assert json.loads(opened.resolved.read_text())["run"]["name"] == "first"
    assert (opened.path / "logs" / "latest").resolve() == opened.logs.resolve()


def test_a_used_directory_is_refused_and_left_as_it_is(run):
    opened = start(run)
    with pytest.raises(ConfigError, match=r"holds an earlier run; go on with --resume, start afresh with --clean"):
        start(run)
    assert not (opened.path / "configs" / "attempt_2").exists()


def test_clean_deletes_what_a_run_wrote_and_nothing_else(run):
    opened = start(run)
    checkpoint(opened, 3)
    (opened.path / "metrics.jsonl").write_text("{}\n")
    (opened.path / "notes.txt").write_text("mine")
    again = start(run.model_copy(update={"clean": True}))
    assert again.attempt == 1
    assert json.loads(again.resolved.read_text())["run"]["clean"] is False  # to run resolved.json again deletes nothing
    assert sorted(path.name for path in again.path.iterdir()) == [".lock", "configs", "logs", "notes.txt"]


def test_a_directory_that_is_no_run_is_never_cleaned(run, tmp_path):
    (tmp_path / "runs" / "first" / "weights").mkdir(parents=True)
    with pytest.raises(ConfigError, match="exists and is not a run directory"):
        start(run.model_copy(update={"clean": True}))
    assert (tmp_path / "runs" / "first" / "weights").is_dir()


def test_what_cannot_become_a_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("nowhere").symlink_to("gone")
    Path("loop").symlink_to("loop")
    for root, name, problem in (
        ("file", "x", "run.root: file is a file; give another"),
        (".", "file", "run.root: file is a file; give another"),
        (".", "nowhere", "run.root: nowhere is a symbolic link to nowhere; give another"),
        ("loop/deeper", "x", "Too many levels of symbolic links; give another"),
        (".", "a" * 300, "File name too long; give another"),
    ):
        found = run_dir.problems(RunConfig(name=name, root=root), FRESH)
        assert len(found) == 1
        assert problem in found[0]
    assert run_dir.problems(RunConfig(name="new", root="new/root"), FRESH) == []


def test_a_resume_goes_on_from_the_last_complete_checkpoint(run):
    opened = start(run)
    for step, complete in ((2, True), (10, True), (11, False)):
        checkpoint(opened, step, complete)
    again = start(run, RESUME)
    assert (again.attempt, again.resume_from.step) == (2, 10)
    # every process of the attempt is given this very checkpoint
    assert json.loads(again.resolved.read_text())["resume"] == {"enabled": True, "dir": str(opened.path / "checkpoints" / "step_10")}


def test_a_resume_without_a_complete_checkpoint_is_refused(run):
    checkpoint(start(run), 5, complete=False)
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        start(run, RESUME)


def test_resume_and_clean_contradict_each_other(run):
    checkpoint(start(run), 5)
    with pytest.raises(ConfigError, match="--resume and --clean contradict each other"):
        start(run.model_copy(update={"clean": True}), RESUME)


def test_a_resume_forgets_what_was_made_after_its_checkpoint(run):
    opened = start(run)
    for step, complete in ((4, True), (5, False)):
        checkpoint(opened, step, complete)
    (opened.path / "checkpoints" / "step_6.partial").mkdir()
    for folder, names in {
        "batches": ("step_4.batch", "step_5.batch"),
        "weights": ("4", "5"),
        "exchange": ("step_5.batch",),
        "hf": ("sft",),
    }.items():
        for name in names:
            (opened.path / folder / name).mkdir(parents=True)
    lines = [json.dumps({"step": step}) for step in (1, 4, 5)]
    (opened.path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 6, "rew')
    again = start(run, RESUME)
    left = sorted(
        str(path.relative_to(again.path)) for path in again.path.glob("*/*") if not path.parent.name.endswith(("configs", "logs"))
    )
    assert left == ["batches/step_4.batch", "checkpoints/step_4", "hf/sft"]
    assert (again.path / "metrics.jsonl").read_text() == "\n".join(lines[:2]) + "\n"


def test_a_resume_rolls_back_the_lines_of_its_own_stage_only(run):
    opened = start(run)
    checkpoint(opened, 1)
    lines = '{"step": 1}\n{"step": 2}\n'
    for name in ("metrics.jsonl", "sft_metrics.jsonl"):
        (opened.path / name).write_text(lines)
    start(run, RESUME)  # of RL: the warm-up's two steps are behind it
    assert (opened.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (opened.path / "sft_metrics.jsonl").read_text() == lines
    table = {"run": run.model_dump(), "model": {"path": "m"}, "sft": {"data": "rows.jsonl"}, "resume": RESUME.model_dump()}
    run_dir.open_run(SftRunConfig.model_validate(table), run, RESUME, ["sft"]).lock.close()
    assert (opened.path / "sft_metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_checkpoint_deleted_half_way_does_not_count(run, monkeypatch):
    opened = start(run)
    for step in (4, 8):
        checkpoint(opened, step)
    monkeypatch.setattr(run_dir.shutil, "rmtree", lambda path: None)  # killed before anything but the marker is gone
    run_dir.roll_back(opened.path, 4, "metrics.jsonl")
    assert [found.step for found in run_dir.complete_checkpoints(opened.path)] == [4]


def test_a_fork_starts_a_new_run_from_anothers_checkpoint_without_its_warm_up(run):
    first = start(run)
    checkpoint(first, 7)
    fork = start(RunConfig(name="fork", root=run.root), ResumeConfig(enabled=True, dir=str(first.path)))
    resolved = RLConfig.model_validate_json(fork.resolved.read_text())
    assert (fork.resume_from.step, resolved.resume.dir, resolved.warms_up) == (7, str(first.path / "checkpoints" / "step_7"), False)
    checkpoint(fork, 9)
    # a resumed fork has no warm-up's export either
    again = start(RunConfig(name="fork", root=run.root), RESUME)
    assert not RLConfig.model_validate_json(again.resolved.read_text()).warms_up


def test_a_used_directory_is_not_forked_into(run):
    first = start(run)
    checkpoint(first, 7)
    start(RunConfig(name="second", root=run.root))
    with pytest.raises(ConfigError, match="holds an earlier run; it can't be forked into"):
        start(RunConfig(name="second", root=run.root), ResumeConfig(enabled=True, dir=str(first.path)))


def test_a_directory_in_use_is_refused_until_its_holder_ends(run):
    opened = start(run)
    checkpoint(opened, 1)
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()

    def hold():
        lock = run_dir._lock(opened.path)
        ready.set()
        end.wait()
        lock.close()

    holder = context.Process(target=hold)
    holder.start()
    ready.wait()
    with pytest.raises(ConfigError, match=rf"is in use by a running megatron-rl \(pid {holder.pid}\)"):
        start(run, RESUME)
    end.set()
    holder.join()
    assert start(run, RESUME).attempt == 2
