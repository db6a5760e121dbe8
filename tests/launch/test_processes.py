"""A process that dies ends the whole run within the grace period, is named in one line, and nothing outlives a run.

Real processes; tests wait for events (a line printed, a process gone), never for a time.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron_rl.launch.process_groups import MARKER, processes
from megatron_rl.launch.processes import RunFailed, Supervisor, last_words

SLEEP = "import time; time.sleep(600)"
DEADLINE_S = 30
"""Of every wait for an event: what the launcher promises."""


def python(program):
    return [sys.executable, "-c", textwrap.dedent(program)]


@pytest.fixture
def supervisor(tmp_path):
    with Supervisor(tmp_path, grace_s=1) as started:
        yield started


def until(condition):
    """The first true value of `condition`."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("the event did not happen")


def logged(child, word):
    """The log, once `word` is in it and its last line is whole."""
    return until(lambda: word in (text := child.log.read_text()) and text.endswith("\n") and text)


def alive(pid):
    return any(process.pid == pid for process in processes())


def failure(supervisor, *ends):
    with pytest.raises(RunFailed) as caught:
        supervisor.wait(*ends)
    return caught.value


def test_a_run_ends_well_when_all_that_was_waited_for_has_ended_well(supervisor):
    engine = supervisor.start("engine_0", python(SLEEP))
    supervisor.wait(supervisor.start("trainer_0", python("print('done')")), supervisor.start("trainer_1", python("pass")))
    assert engine.process.poll() is None
    supervisor.stop(engine)
    assert engine.process.returncode == -signal.SIGTERM
    assert supervisor.children == []


def test_a_killed_process_is_named_with_pid_signal_log_and_last_error(supervisor, tmp_path):
    engine = supervisor.start("engine_0", python(f"print('INFO all well'); print('ERROR out of cache'); print('bye', flush=True); {SLEEP}"))
    trainer = supervisor.start("trainer_0", python(SLEEP))
    logged(engine, "bye")
    os.kill(engine.process.pid, signal.SIGKILL)
    failed = failure(supervisor, trainer)
    assert failed.code == 1
    assert str(failed) == (
        f"engine_0 (pid {engine.process.pid}) was killed by SIGKILL (from outside, or by the kernel: out of memory?); "
        f"log: {tmp_path}/engine_0.log; last error: ERROR out of cache"
    )


def test_the_users_mistake_in_a_child_is_the_users_mistake_of_the_run(supervisor):
    trainer = supervisor.start("trainer_0", python("import sys; print('error: model.path: no such model', file=sys.stderr); sys.exit(2)"))
    failed = failure(supervisor, trainer)
    assert failed.code == 2
    assert "trainer_0" in str(failed) and "ended with exit code 2" in str(failed)
    assert str(failed).endswith("last error: model.path: no such model")


def test_an_engine_that_ends_well_too_early_is_a_failure(supervisor):
    supervisor.start("engine_0", python("pass"))
    failed = failure(supervisor, supervisor.start("trainer_0", python(SLEEP)))
    assert "engine_0" in str(failed) and "exit code 0" in str(failed)


def test_a_sigkill_is_named_before_the_failures_it_causes(supervisor):
    # both are dead by the first look; rank 0's own exit came first
    first = supervisor.start("trainer_0", python("raise RuntimeError('connection closed by peer')"))
    second = supervisor.start("trainer_1", python(SLEEP))
    first.process.wait()
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait()
    assert str(failure(supervisor, first, second)).startswith("trainer_1 ")


def test_what_was_started_first_is_named_when_others_follow_it(supervisor):
    # an engine that is slow to end after its error, and an orchestrator that fails on its first refused request
    engine = supervisor.start("engine_0", python("import time; time.sleep(1); raise RuntimeError('no such kernel')"))
    orchestrator = supervisor.start("orchestrator", python("raise ConnectionError('answered 500')"))
    orchestrator.process.wait()
    assert engine.process.poll() is None
    assert str(failure(supervisor, orchestrator)).endswith("last error: RuntimeError: no such kernel")


INNER = """
    import multiprocessing, sys, time
    def work():
        print("inner", multiprocessing.current_process().pid, flush=True)
        time.sleep(600)
    if __name__ == "__main__":
        multiprocessing.get_context("spawn").Process(target=work, name="VLLM::EngineCore").start()
        time.sleep(600)
"""


def test_a_killed_inner_process_ends_the_run_and_is_named(supervisor, tmp_path):
    program = tmp_path / "engine.py"
    program.write_text(textwrap.dedent(INNER))
    engine = supervisor.start("engine_0", [sys.executable, str(program)])
    inner = int(logged(engine, "inner").split()[1])
    supervisor.wait_until(lambda: inner in engine.inner)
    os.kill(inner, signal.SIGKILL)
    assert f"engine_0 (pid {engine.process.pid}) is of no use after its process worker (pid {inner}) died" in str(
        failure(supervisor, engine)
    )


RENAMED = """
    import multiprocessing, time
    import setproctitle
    def work():
        time.sleep(1)
        setproctitle.setproctitle("something else")
        print("renamed", flush=True)
        time.sleep(3)
    if __name__ == "__main__":
        inner = multiprocessing.get_context("spawn").Process(target=work)
        inner.start()
        inner.join()
"""


def test_an_inner_process_that_renames_itself_is_not_lost(supervisor, tmp_path):
    program = tmp_path / "engine.py"
    program.write_text(textwrap.dedent(RENAMED))
    engine = supervisor.start("engine_0", [sys.executable, str(program)])
    supervisor.wait_until(lambda: engine.inner)
    logged(engine, "renamed")
    supervisor._look_inside()
    assert engine.inner and engine.lost is None


FORKING = """
    import multiprocessing, os, time
    def work():
        if os.fork() == 0:  # as before an exec
            print("forked", os.getpid(), flush=True)
            time.sleep(600)
        time.sleep(600)
    if __name__ == "__main__":
        multiprocessing.get_context("spawn").Process(target=work).start()
        time.sleep(600)
"""


def test_a_fork_of_an_inner_process_is_not_one(supervisor, tmp_path):
    program = tmp_path / "engine.py"
    program.write_text(textwrap.dedent(FORKING))
    engine = supervisor.start("engine_0", [sys.executable, str(program)])
    fork = int(logged(engine, "forked").split()[1])
    supervisor._look_inside()
    os.kill(fork, signal.SIGKILL)
    until(lambda: not alive(fork))
    supervisor._look_inside()
    assert len(engine.inner) == 1 and engine.lost is None


def test_nothing_outlives_the_supervisor_not_even_what_left_its_session_or_ignores_sigterm(tmp_path):
    program = f"""
        import signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        escaped = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
        print("escaped", escaped.pid, flush=True)
        {SLEEP}
    """
    with Supervisor(tmp_path, grace_s=1) as supervisor:
        child = supervisor.start("engine_0", python(program))
        escaped = int(logged(child, "escaped").split()[1])
    assert not alive(escaped)
    assert child.process.returncode == -signal.SIGKILL


LAUNCHER = """
    import signal, sys
    from pathlib import Path
    from megatron_rl.launch.processes import Supervisor
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    grandchild = f"import subprocess; p = subprocess.Popen({sleep!r}); print(p.pid, flush=True); p.wait()"
    with Supervisor(Path(sys.argv[1])) as supervisor:
        child = supervisor.start("engine_0", [sys.executable, "-c", grandchild])
        print(supervisor.run, flush=True)
        supervisor.wait(child)
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_launcher_however_it_is_ended(tmp_path, sig):
    launcher = subprocess.Popen([*python(LAUNCHER), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    run = launcher.stdout.readline().strip()
    grandchild = int(until(lambda: (tmp_path / "engine_0.log").exists() and (tmp_path / "engine_0.log").read_text()))
    assert alive(grandchild)
    os.kill(launcher.pid, sig)
    launcher.wait()
    launcher.stdout.close()
    until(lambda: not alive(grandchild))
    until(lambda: not carriers(run))


def carriers(run):
    """Processes that belong to run `run`, by environment or by command line (its watchdog)."""
    found = []
    for process in processes():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_text()
        except OSError:
            continue
        if f"{MARKER}={run}" in environment or run in process.title:
            found.append(process)
    return found


def test_a_killed_watchdog_ends_the_run(supervisor):
    child = supervisor.start("engine_0", python(SLEEP))
    os.kill(supervisor._watchdog.pid, signal.SIGKILL)
    supervisor._watchdog.wait()
    assert "the watchdog" in str(failure(supervisor, child))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "INFO a\nTraceback (most recent call last):\n  File x\nValueError: bad shape\nINFO shutting down\n",
            "last error: ValueError: bad shape",
        ),
        ("error: first\nerror: model.path: gone\n", "last error: model.path: gone"),
        (
            "(EngineCore pid=7) ERROR 11-29 [core.py:15] out of memory\n",
            "last error: (EngineCore pid=7) ERROR 11-29 [core.py:15] out of memory",
        ),
        (
            "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m ERROR 11-29 23:40:04 [core.py:1512] RuntimeError: no such kernel\n"
            "(APIServer pid=6) ERROR 11-29 23:40:04 [async_llm.py:906] vllm.exceptions.EngineDeadError: see above\n"
            "(APIServer pid=6) INFO shutting down\n",
            "last error: RuntimeError: no such kernel",
        ),
        ("torch.distributed.DistBackendError: timed out\n", "last error: torch.distributed.DistBackendError: timed out"),
        ("0 errors in error_count = 0\nlast words\n", "last line: last words"),
        ("", ""),
    ],
)
def test_the_last_words_of_a_log_are_its_error_if_it_has_one(tmp_path, text, words):
    (tmp_path / "log").write_text(text)
    assert last_words(tmp_path / "log") == words
