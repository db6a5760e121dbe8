"""One weight update over all engines as a pure state machine: it says what to do next and is told what came of it.

    STAGE all -> PAUSE all -> FLIP all -> RESUME all -> applied
      | any fails: DROP all, refused   (nothing was paused, the old version never stopped serving)
                 | any fails: RESUME all, then DROP all, refused
                            | any fails: that engine is broken: ABORT its requests; the others flip and RESUME
                                         | any fails: that engine is broken, too: it would freeze whatever it is sent

Each step of one engine starts only when the step before is over on every engine, so engines flip together or not at all.
RESUME is attempted on every engine that PAUSE was attempted on and that is not broken.
All steps are harmless to repeat, so is the whole update.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class Step(enum.Enum):
    """What an engine is asked to do."""

    STAGE = "stage"
    """Read and verify the version into a shadow copy, serving the old one meanwhile."""
    PAUSE = "pause"
    """Freeze requests in flight."""
    FLIP = "flip"
    """Put the verified copy in place of the weights."""
    RESUME = "resume"
    """Let the frozen requests go on."""
    DROP = "drop"
    """Forget the shadow copy of a refused version."""
    ABORT = "abort"
    """End the requests of an engine whose weights are of no version."""


class Outcome(enum.Enum):
    APPLIED = "applied"
    REFUSED = "refused"
    """Every engine serves the version it had."""
    BROKEN = "broken"
    """At least one engine holds no whole version, or did not resume; the others serve the new one."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, where."""

    engine: str
    step: Step
    reason: str
    tensor: str | None = None

    def __str__(self) -> str:
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        return f"engine {self.engine}, {self.step.value}{tensor}: {self.reason}"


@dataclass
class Update:
    """The state of one update of `engines` (their URLs) to `version`. Times are seconds of any one monotonic clock."""

    version: int
    engines: Sequence[str]
    timeout_s: float
    failures: list[Failure] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each step, from its start on the first engine to its end on the last."""
    outcome: Outcome | None = None
    _step: Step | None = None
    _waiting: dict[str, Step] = field(default_factory=dict)
    _started: float = 0.0
    _flipped: bool = False

    def begin(self, now: float) -> list[tuple[str, Step]]:
        """The first actions: (engine, step)."""
        return self._enter(Step.STAGE, self.engines, now)

    @property
    def deadline(self) -> float:
        """When the steps now awaited are overdue."""
        return self._started + self.timeout_s

    def succeeded(self, engine: str, step: Step, now: float) -> list[tuple[str, Step]]:
        """Record a result; returns the actions to start because of it. A result nobody waits for any more is ignored."""
        if self._waiting.get(engine) is not step:
            return []
        del self._waiting[engine]
        return self._advance(now)

    def failed(self, failure: Failure, now: float) -> list[tuple[str, Step]]:
        """Record a failure; returns the actions to start because of it."""
        if self._waiting.get(failure.engine) is not failure.step:
            return []
        del self._waiting[failure.engine]
        self.failures.append(failure)
        if failure.step is Step.FLIP or (failure.step is Step.RESUME and self._flipped):
            self.broken.add(failure.engine)
        return self._advance(now)

    def expire(self, now: float) -> list[tuple[str, Step]]:
        """Fail every engine that passed the deadline; returns the actions to start because of it."""
        actions: list[tuple[str, Step]] = []
        if now >= self.deadline:
            for engine, step in list(self._waiting.items()):
                actions += self.failed(Failure(engine, step, f"no answer within {self.timeout_s:g} s"), now)
        return actions

    def _enter(self, step: Step, engines: Sequence[str], now: float) -> list[tuple[str, Step]]:
        self._step, self._started = step, now
        self._waiting = {engine: Step.ABORT if step is Step.RESUME and engine in self.broken else step for engine in engines}
        return list(self._waiting.items())

    def _advance(self, now: float) -> list[tuple[str, Step]]:
        if self._waiting:
            return []
        assert self._step is not None
        self.seconds[self._step.value] = now - self._started
        match self._step:
            case Step.STAGE:
                return self._enter(Step.DROP if self.failures else Step.PAUSE, self.engines, now)
            case Step.PAUSE:
                return self._enter(Step.RESUME if self.failures else Step.FLIP, self.engines, now)
            case Step.FLIP:
                self._flipped = True
                return self._enter(Step.RESUME, self.engines, now)
            case Step.RESUME if not self._flipped:
                return self._enter(Step.DROP, self.engines, now)
            case Step.RESUME:
                self.outcome = Outcome.BROKEN if self.broken else Outcome.APPLIED
            case Step.DROP:
                self.outcome = Outcome.REFUSED
        return []
