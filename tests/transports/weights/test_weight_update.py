"""The update's state machine: every place where an engine can fail, and what the others then do."""

import itertools

import pytest

from megatron_rl.transports.weights.update import Failure, Outcome, Step, Update

ENGINES = ["http://a", "http://b", "http://c"]


def play(update: Update, failing: set[tuple[str, Step]], silent: set[tuple[str, Step]] = frozenset()) -> list[tuple[str, Step]]:
    """Run an update to its outcome on engines that fail or never answer at the given points; the actions in order."""
    queue = update.begin(now=0.0)
    seen = list(queue)
    now = 0.0
    while update.outcome is None:
        now += 1.0
        if queue:
            engine, step = queue.pop(0)
            if (engine, step) in silent:
                continue
            if (engine, step) in failing:
                more = update.failed(Failure(engine, step, "broke", "lm_head.weight"), now)
            else:
                more = update.succeeded(engine, step, now)
        else:
            now = update.deadline
            more = update.expire(now)
        queue += more
        seen += more
    assert not queue
    return seen


def steps_of(actions: list[tuple[str, Step]], engine: str) -> list[Step]:
    return [step for found, step in actions if found == engine]


def test_all_engines_go_through_the_steps_together():
    update = Update(3, ENGINES, timeout_s=100)
    actions = play(update, set())
    assert update.outcome is Outcome.APPLIED
    assert [step for step, _ in itertools.groupby(step for _, step in actions)] == [Step.STAGE, Step.PAUSE, Step.FLIP, Step.RESUME]
    assert update.failures == [] and set(update.seconds) == {"stage", "pause", "flip", "resume"}


@pytest.mark.parametrize("failing", [set(some) for n in (1, 2, 3) for some in itertools.combinations(ENGINES, n)], ids=len)
def test_a_failed_copy_pauses_nobody_and_is_forgotten_everywhere(failing):
    update = Update(3, ENGINES, timeout_s=100)
    actions = play(update, {(engine, Step.STAGE) for engine in failing})
    assert update.outcome is Outcome.REFUSED and not update.broken
    assert all(steps_of(actions, engine) == [Step.STAGE, Step.DROP] for engine in ENGINES)
    assert {failure.engine for failure in update.failures} == failing


def test_a_failed_pause_flips_nobody_and_everybody_is_resumed():
    update = Update(3, ENGINES, timeout_s=100)
    actions = play(update, {("http://b", Step.PAUSE)})
    assert update.outcome is Outcome.REFUSED and not update.broken
    assert all(steps_of(actions, engine) == [Step.STAGE, Step.PAUSE, Step.RESUME, Step.DROP] for engine in ENGINES)


def test_a_failed_flip_breaks_that_engine_only_and_its_requests_are_not_resumed():
    update = Update(3, ENGINES, timeout_s=100)
    actions = play(update, {("http://b", Step.FLIP)})
    assert update.outcome is Outcome.BROKEN and update.broken == {"http://b"}
    assert steps_of(actions, "http://b") == [Step.STAGE, Step.PAUSE, Step.FLIP, Step.ABORT]
    assert steps_of(actions, "http://a") == [Step.STAGE, Step.PAUSE, Step.FLIP, Step.RESUME]


def test_an_engine_that_does_not_resume_is_broken_because_it_would_freeze_its_requests():
    update = Update(3, ENGINES, timeout_s=100)
    play(update, {("http://b", Step.RESUME)})
    assert update.outcome is Outcome.BROKEN and update.broken == {"http://b"}
    assert [str(failure) for failure in update.failures] == ["engine http://b, resume, tensor lm_head.weight: broke"]


@pytest.mark.parametrize("step", [Step.STAGE, Step.PAUSE, Step.FLIP, Step.RESUME])
def test_an_engine_that_never_answers_fails_by_the_deadline_of_its_step(step):
    update = Update(3, ENGINES, timeout_s=100)
    play(update, set(), silent={("http://c", step)})
    assert [(failure.engine, failure.step) for failure in update.failures] == [("http://c", step)]
    assert update.failures[0].reason == "no answer within 100 s"


@pytest.mark.parametrize(
    ("engine", "step"), [(engine, step) for engine in ENGINES for step in (Step.DROP, Step.RESUME, Step.ABORT)], ids=str
)
def test_failures_on_the_way_out_never_stop_the_way_out(engine, step):
    first = {Step.DROP: ("http://a", Step.STAGE), Step.RESUME: ("http://a", Step.PAUSE), Step.ABORT: ("http://a", Step.FLIP)}[step]
    update = Update(3, ENGINES, timeout_s=100)
    play(update, {first, (engine, step)})
    assert update.outcome is (Outcome.BROKEN if step is Step.ABORT else Outcome.REFUSED)


def test_no_engine_begins_a_step_before_all_have_ended_the_one_before():
    update = Update(3, ENGINES, timeout_s=100)
    assert update.begin(0.0) == [(engine, Step.STAGE) for engine in ENGINES]
    assert update.succeeded("http://a", Step.STAGE, 1.0) == []
    assert update.succeeded("http://a", Step.STAGE, 1.0) == []  # said twice
    assert update.succeeded("http://c", Step.STAGE, 2.0) == []
    assert update.succeeded("http://b", Step.STAGE, 3.0) == [(engine, Step.PAUSE) for engine in ENGINES]
    assert update.seconds == {"stage": 3.0}


def test_an_answer_after_the_deadline_changes_nothing():
    update = Update(3, ["http://a"], timeout_s=10)
    update.begin(0.0)
    assert update.expire(9.9) == []
    assert update.expire(10.0) == [("http://a", Step.DROP)]
    assert update.succeeded("http://a", Step.STAGE, 11.0) == []
    update.succeeded("http://a", Step.DROP, 12.0)
    assert update.outcome is Outcome.REFUSED
