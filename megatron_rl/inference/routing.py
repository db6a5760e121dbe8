"""Which engine serves a request: the one that served its session before, else the least loaded. Pure."""

from collections import OrderedDict
from collections.abc import Iterable

REMEMBERED_SESSIONS = 1 << 16
"""A session not heard of for this many others starts afresh: it loses its prefix cache, nothing else."""


class NoEngine(Exception):
    """Every engine is out of use."""


class Router:
    """Sticky least-loaded routing. Ties go to the engine with the fewest sessions, then to the first: the order of calls decides alone."""

    def __init__(self, engines: Iterable[str], remembered: int = REMEMBERED_SESSIONS) -> None:
        self.in_flight = dict.fromkeys(engines, 0)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._held = dict.fromkeys(self.in_flight, 0)
        self._usable = set(self.in_flight)
        self._remembered = remembered

    def acquire(self, session: str) -> str:
        """The engine for one request of `session`; give it back with `release`. Raises NoEngine."""
        engine = self._sessions.pop(session, None)
        if engine is not None:
            self._held[engine] -= 1
        if engine not in self._usable:
            if not self._usable:
                raise NoEngine("no engine is in use")
            engine = min((found for found in self.in_flight if found in self._usable), key=lambda e: (self.in_flight[e], self._held[e]))
        self._sessions[session] = engine
        self._held[engine] += 1
        if len(self._sessions) > self._remembered:
            self._held[self._sessions.popitem(last=False)[1]] -= 1
        self.in_flight[engine] += 1
        return engine

    def release(self, engine: str) -> None:
        """A request is over."""
        self.in_flight[engine] -= 1

    def use(self, engine: str) -> None:
        """Route to this engine (again)."""
        self._usable.add(engine)

    def avoid(self, engine: str) -> None:
        """Route nothing more to this engine; its sessions move when they next ask."""
        self._usable.discard(engine)
