"""Which task comes next: sources mixed by ratio, each in its own order, and what was drawn but not shipped.

Draw k picks its source by hash(seed, k), and a source's epoch e is shuffled by (seed, source, e): the state is a few
counters, and restoring it restores the random choices exactly.
"""

import functools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from megatron_rl.config.base import ConfigError
from megatron_rl.envs.sources import Source


@dataclass(frozen=True)
class Draw:
    """Group `number` (0, 1, 2, ... over the whole run) runs task `index` of a source."""

    number: int
    source: str
    index: int


class Cursor:
    """A source's tasks, epoch after epoch, each epoch in an order of its own."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed, self.position = source, seed, 0
        self._order = functools.lru_cache(maxsize=1)(self._shuffled)

    def next(self) -> int:
        epoch, offset = divmod(self.position, len(self.source.indices))
        self.position += 1
        return self._order(epoch)[offset]

    def _shuffled(self, epoch: int) -> Sequence[int]:
        if not self.source.shuffle:
            return self.source.indices
        order = list(self.source.indices)
        random.Random(f"{self.seed}/{self.source.id}/{epoch}").shuffle(order)
        return order


class Tasks:
    """The stream of draws. A draw is open until `settle`: its group shipped, or was dropped for good."""

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self._seed = seed
        self._cursors = {source.id: Cursor(source, seed) for source in sources}
        self._drawn = 0
        self._open: dict[int, Draw] = {}
        self._again: deque[Draw] = deque()

    def draw(self) -> Draw:
        """The next task: first those that a restored state left open, in their order and under their numbers."""
        if self._again:
            draw = self._again.popleft()
        else:
            source = self._pick(self._drawn)
            draw = Draw(self._drawn, source, self._cursors[source].next())
            self._drawn += 1
        self._open[draw.number] = draw
        return draw

    def settle(self, number: int) -> None:
        del self._open[number]

    def _pick(self, number: int) -> str:
        sources = [cursor.source for cursor in self._cursors.values()]
        point = xxhash.xxh3_64_intdigest(f"{self._seed}/mix/{number}".encode()) / 2**64 * sum(source.ratio for source in sources)
        for source in sources:
            point -= source.ratio
            if point < 0:
                return source.id
        return sources[-1].id

    def state(self) -> dict[str, Any]:
        """Plain values for msgpack; open draws are kept in it."""
        unshipped = [*self._open.values(), *self._again]
        return {
            "drawn": self._drawn,
            "sources": {
                name: {"position": cursor.position, "tasks": [cursor.source.indices.start, cursor.source.indices.stop]}
                for name, cursor in self._cursors.items()
            },
            "open": [[draw.number, draw.source, draw.index] for draw in sorted(unshipped, key=lambda draw: draw.number)],
        }

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Go on from `state`. A new source starts at its first task, open draws of one that is gone are left out.

        Returns a sentence for each such difference. ConfigError if a source has other tasks than it had.
        """
        remarks = []
        self._drawn = state["drawn"]
        for name, saved in state["sources"].items():
            cursor = self._cursors.get(name)
            if cursor is None:
                remarks.append(f"source {name!r} of the checkpoint is no longer there; its open tasks are left out")
                continue
            now = [cursor.source.indices.start, cursor.source.indices.stop]
            if now != saved["tasks"]:
                raise ConfigError(
                    f"source {name!r} has tasks {now[0]} to {now[1] - 1}, at the checkpoint it had {saved['tasks'][0]} to "
                    f"{saved['tasks'][1] - 1}: resume with the same select and size, or give the source a new id"
                )
            cursor.position = saved["position"]
        new = [name for name in self._cursors if name not in state["sources"]]
        remarks += [f"source {name!r} is not in the checkpoint; it starts at its first task" for name in new]
        self._open.clear()
        self._again = deque(Draw(*row) for row in state["open"] if row[1] in self._cursors)
        return remarks
