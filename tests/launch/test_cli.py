"""The command line: help like a manual, exit codes, a dry run that touches nothing, and the polyglot script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import cli

ROOT = Path(__file__).parent.parent.parent
POLYGLOT = ROOT / "examples" / "pretrain_rl.sh"


def run(*words, cwd=None, **environment):
    """(exit code, stdout, stderr) of a command."""
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", list(cli.SUBCOMMANDS))
def test_help_says_what_a_subcommand_is_for_with_examples_and_every_key(name, capsys):
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"megatron-rl {name}: ")
    assert "usage\n" in text and "examples\n" in text and f"megatron-rl {name}" in text.split("examples\n")[1]
    if cli.SUBCOMMANDS[name].config and cli.SUBCOMMANDS[name].files:
        for word in ("[model]", "path", "required", "--dry-run", "@ FILE"):
            assert word in text


def test_help_shows_the_defaults_of_each_place(capsys):
    cli.main(["rl", "--help"])
    text = capsys.readouterr().out
    assert "as [sft.optim], with default lr = 1e-06" in text  # trainer.optim, after sft.optim with 1e-05
    assert "as [train.sampling], with default temperature = 0.0" in text  # eval is greedy


def test_help_and_dry_run_import_no_torch(place):
    for words in (["rl", "--help"], ["doctor"], ["rl", "@", "rl.toml", "--dry-run"]):
        program = f"import sys; from megatron_rl.cli import main; code = main({words!r}); print(code, 'torch' in sys.modules)"
        assert run(sys.executable, "-c", program, cwd=place)[1].splitlines()[-1] == "0 False"


def test_a_dry_run_prints_config_and_placement_and_touches_nothing(place, capsys):
    before = sorted(place.rglob("*"))
    words = [
        "rl",
        "@",
        "rl.toml",
        "--dry-run",
        "--trainer.parallel.tensor-parallel",
        "2",
        "--inference.engines",
        "2",
        "--sft.data",
        "rows.jsonl",
    ]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    shown = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert (shown["model"]["path"], shown["trainer"]["parallel"]["tensor_parallel"]) == ("model", 2)
    rows = [line.split()[0] for line in text[text.rindex("}") :].splitlines() if line and not line.startswith(" ")]
    for process in ("engine_0", "engine_1", "sft_0", "sft_1", "trainer_0", "trainer_1", "orchestrator"):
        assert process in rows
    assert [path for path in sorted(place.rglob("*")) if "__pycache__" not in path.parts] == before


def test_ranks_of_torchrun_refuse_a_used_directory_whatever_they_train(place, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    (place / "sft.toml").write_text('run.name = "used"\nmodel = { path = "model", context = 64 }\nsft.data = "rows.jsonl"\n')
    (place / "runs" / "used" / "configs").mkdir(parents=True)
    for words in (["sft", "@", "sft.toml"], ["rl", "@", "rl.toml", "--run.name", "used"]):
        assert cli.main(words) == 2
        assert capsys.readouterr().err.startswith("error: run.name: runs/used holds an earlier run")


def test_a_dry_run_tells_the_problems_too(place, capsys):
    assert cli.main(["rl", "@", "rl.toml", "--dry-run", "--model.path", "gone"]) == 2
    assert capsys.readouterr().err.startswith("error: model.path: gone is not a directory")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["rll"], "error: unknown subcommand 'rll'; known: rl, "),
        (["rl"], "error: no config given"),
        (["rl", "@", "rl.toml", "--sed", "1"], "error: sed: unknown key (command line); did you mean seed?"),
        (["orchestrator", "@", "rl.toml"], "error: the following arguments are required: --engine, --batches"),
        (["trainer", "@", "rl.toml", "--stage", "x"], "error: argument --stage: invalid choice: 'x'"),
        (["inference", "@", "rl.toml", "--port", "x"], "error: argument --port: invalid int value: 'x'"),
        (["doctor", "now"], "error: doctor takes no arguments, got now"),
    ],
)
def test_the_users_mistakes_exit_with_2_and_one_line_each(place, capsys, words, error):
    assert cli.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(error)


def test_a_users_error_of_many_lines_is_told_in_one(place, capsys):
    (place / "echo.py").write_text(
        (place / "echo.py").read_text().replace("return Task(", 'raise ValueError("one\\n\\n  two"); return Task(')
    )
    assert cli.main(["rl", "@", "rl.toml", "--dry-run"]) == 2
    error = "error: train: source 'echo': task 0 of env 'echo.py' can't be made: ValueError: one two\n"
    assert capsys.readouterr().err == error


def test_our_own_mistakes_exit_with_1_one_line_and_a_traceback(place, monkeypatch, capsys):
    monkeypatch.setattr("megatron_rl.launch.doctor.stack_report", lambda: 1 / 0)
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "error: ZeroDivisionError: division by zero (traceback above)"
    assert lines[0] == "Traceback (most recent call last):"


def test_doctor_says_what_this_machine_can_run(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "megatron-core", "vllm", "what this machine can run", "sft, trainer"):
        assert word in text


@pytest.mark.parametrize("shell", [["bash"], ["sh"], [sys.executable], []])
def test_the_polyglot_runs_under_a_shell_under_python_and_by_itself(place, shell):
    (place / "over.toml").write_text("seed = 7\n")
    code, out, err = run(*shell, str(POLYGLOT), "rl.toml", "over.toml", "--run.name", "a.toml", "--dry-run", cwd=place)
    assert (code, err) == (0, "")
    shown = json.loads(out[out.index("{") : out.rindex("}") + 1])
    assert (shown["seed"], shown["run"]["name"]) == (7, "a.toml")


def test_the_polyglot_passes_exit_codes_on(place):
    assert run("bash", str(POLYGLOT), "absent.toml", cwd=place) == (
        2,
        "",
        "error: absent.toml: cannot be read: No such file or directory\n",
    )


@pytest.mark.ranks
@pytest.mark.parametrize("no_python", [["--no-python"], []])
def test_the_polyglot_runs_under_torchrun_as_a_program_and_as_a_python_file(place, no_python):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *no_python]
    code, out, err = run(*torchrun, str(POLYGLOT), "rl.toml", "--dry-run", cwd=place, OMP_NUM_THREADS="1")
    assert code == 0, err
    assert out.count("run directory  runs/first") == 2  # both ranks


def test_shell_scripts_parse():
    for script in (POLYGLOT, *ROOT.glob("tools/*.sh"), *ROOT.glob("examples/*/*.sh"), ROOT / ".ci" / "run"):
        assert run("bash", "-n", str(script)) == (0, "", ""), script


def test_each_make_target_is_in_the_help():
    _, out, _ = run("make", "--no-print-directory", cwd=ROOT)
    assert [line.split()[1] for line in out.splitlines()] == [
        "help",
        "venv",
        "te",
        "demo",
        "test",
        "test-fast",
        "test-long",
        "lint",
        "docs",
        "lock",
        "clean",
    ]
