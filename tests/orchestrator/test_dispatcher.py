"""Every rollout ends exactly once, however completions, timeouts, cancellations and failures interleave."""

import asyncio
import random
from collections import Counter

import pytest
from test_groups import group, rollout

from megatron_rl.orchestrator.dispatcher import Dispatcher


@pytest.mark.parametrize("seed", range(25))
def test_every_rollout_ends_once_as_a_rollout_or_a_counted_cancellation(seed):
    rng = random.Random(seed)
    limit = rng.randint(1, 12)
    running = 0

    async def run(g, index):
        nonlocal running
        running += 1
        assert running <= limit
        try:
            for _ in range(rng.choice([0, 0, 1, 5, 30])):
                await asyncio.sleep(0)
            return rollout(index, group=g.id)
        finally:
            running -= 1

    async def scenario():
        wake = asyncio.Event()
        dispatcher = Dispatcher(run, limit, wake)
        groups = [group(rng.randint(1, 8), number) for number in range(20)]
        cancelled, waiting, ended = set(), list(groups), []
        while waiting or dispatcher.load:
            while waiting and dispatcher.has_room:
                dispatcher.open(waiting.pop(0))
            if rng.random() < 0.2:
                victim = rng.choice(groups[: len(groups) - len(waiting)])
                cancelled.add(victim.id)
                dispatcher.cancel(victim)
            ended += dispatcher.take()
            if dispatcher.load:
                await wake.wait()
                wake.clear()
        ended += dispatcher.take()
        once = Counter((g.id, index) for g, index, _ in ended)
        assert set(once.values()) == {1}
        assert len(ended) + dispatcher.cancelled == sum(g.size for g in groups)
        assert all(r.rollout_id == f"{g.id}-{index}" for g, index, r in ended)
        per_group = Counter(g.id for g, _, _ in ended)
        assert all(per_group[g.id] == g.size for g in groups if g.id not in cancelled)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_rollouts_start_in_the_order_of_their_groups_and_indices():
    started = []

    async def run(g, index):
        started.append((g.draw.number, index))
        await asyncio.sleep(0)
        return rollout(index, group=g.id)

    async def scenario():
        dispatcher = Dispatcher(run, 2, asyncio.Event())
        for number in range(3):
            dispatcher.open(group(3, number))
        while dispatcher.load:
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert started == [(number, index) for number in range(3) for index in range(3)]


def test_an_exception_is_fatal_and_nothing_more_is_started():
    started = []

    async def run(g, index):
        started.append(index)
        if index == 1:
            raise ConnectionError("engine 2 is gone")
        await asyncio.sleep(60)

    async def scenario():
        wake = asyncio.Event()
        dispatcher = Dispatcher(run, 3, wake)
        dispatcher.open(group(8))
        await wake.wait()
        with pytest.raises(ConnectionError, match="engine 2 is gone"):
            dispatcher.take()
        await dispatcher.close()
        assert dispatcher.load == 0
        assert started == [0, 1, 2]
        assert dispatcher.cancelled == 7  # 2 running, 5 waiting

    asyncio.run(asyncio.wait_for(scenario(), 5))
