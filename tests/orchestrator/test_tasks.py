import random
from collections import Counter
from types import SimpleNamespace

import msgpack
import pytest

from megatron_rl.config.base import ConfigError
from megatron_rl.orchestrator.tasks import Draw, Tasks


def source(name, tasks=7, ratio=1.0, shuffle=True):
    indices = tasks if isinstance(tasks, range) else range(tasks)
    return SimpleNamespace(id=name, indices=indices, ratio=ratio, shuffle=shuffle)


def draws(tasks, n):
    return [tasks.draw() for _ in range(n)]


def test_each_epoch_has_every_selected_task_once_in_an_order_of_its_own():
    drawn = [d.index for d in draws(Tasks([source("a", range(3, 10))], seed=0), 21)]
    epochs = [drawn[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(3, 10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_shuffle_the_environments_order_repeats():
    assert [d.index for d in draws(Tasks([source("a", range(2, 5), shuffle=False)], 0), 7)] == [2, 3, 4, 2, 3, 4, 2]


def test_the_seed_decides_the_order_and_sources_do_not_share_theirs():
    first = [draws(Tasks([source("a", 50)], seed), 50) for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]
    mixed = draws(Tasks([source("a", 50), source("b", 50)], 0), 400)
    order = {name: [d.index for d in mixed if d.source == name][:50] for name in "ab"}
    assert order["a"] != order["b"]
    assert order["a"] == [d.index for d in first[0]]  # a source's order does not depend on the other sources


def test_sources_are_mixed_by_ratio():
    drawn = Counter(d.source for d in draws(Tasks([source("a", ratio=3), source("b", ratio=1), source("c", ratio=0.5)], 0), 4500))
    assert abs(drawn["a"] - 3000) < 150 and abs(drawn["b"] - 1000) < 120 and abs(drawn["c"] - 500) < 90  # about 5 sigma


@pytest.mark.parametrize("seed", range(20))
def test_a_restored_state_draws_what_was_open_then_goes_on_without_a_gap(seed):
    """However draws and settlements interleave: settled before + drawn after = an uninterrupted run's draws, each once."""
    rng = random.Random(seed)
    sources = [source("a", 5), source("b", 11, ratio=2)]
    tasks, settled = Tasks(sources, seed), []
    still_open = []
    for _ in range(rng.randint(1, 60)):
        still_open.append(tasks.draw())
        while still_open and rng.random() < 0.45:
            done = still_open.pop(rng.randrange(len(still_open)))
            tasks.settle(done.number)
            settled.append(done)
    state = msgpack.unpackb(msgpack.packb(tasks.state()))
    resumed = Tasks(sources, seed)
    assert resumed.restore(state) == []
    assert resumed.state() == tasks.state()
    again = draws(resumed, len(still_open))
    assert again == sorted(still_open, key=lambda d: d.number)
    everything = sorted([*settled, *again, *draws(resumed, 30)], key=lambda d: d.number)
    assert everything == draws(Tasks(sources, seed), len(everything))


def test_a_state_saved_while_draws_wait_to_be_repeated_keeps_them():
    tasks = Tasks([source("a")], 0)
    first = draws(tasks, 4)
    middle = Tasks([source("a")], 0)
    middle.restore(tasks.state())
    assert middle.draw() == first[0]
    last = Tasks([source("a")], 0)
    last.restore(middle.state())
    assert draws(last, 4) == first


def test_settling_twice_is_an_error():
    tasks = Tasks([source("a")], 0)
    tasks.settle(tasks.draw().number)
    with pytest.raises(KeyError):
        tasks.settle(0)


def test_changed_sources_on_resume():
    old = Tasks([source("a"), source("b")], 0)
    drawn = draws(old, 6)
    new = Tasks([source("a"), source("c", 4)], 0)
    assert new.restore(old.state()) == [
        "source 'b' of the checkpoint is no longer there; its open tasks are left out",
        "source 'c' is not in the checkpoint; it starts at its first task",
    ]
    kept = [d for d in drawn if d.source == "a"]
    assert draws(new, len(kept)) == kept
    assert new.draw().number == 6
    with pytest.raises(ConfigError, match=r"source 'a' has tasks 0 to 8, at the checkpoint it had 0 to 6: resume with the same select"):
        Tasks([source("a", 9), source("b")], 0).restore(old.state())


def test_draws_are_plain():
    assert draws(Tasks([source("a", 1)], 0), 2) == [Draw(0, "a", 0), Draw(1, "a", 0)]
