"""Sticky least-loaded routing."""

import pytest

from megatron_rl.inference.routing import NoEngine, Router


def test_new_sessions_go_to_the_least_loaded_engine():
    router = Router(["a", "b", "c"])
    assert [router.acquire(f"s{i}") for i in range(4)] == ["a", "b", "c", "a"]
    router.release("b")
    assert router.acquire("s4") == "b"  # 2, 0, 1 in flight


def test_a_session_keeps_its_engine_even_when_others_are_idle():
    router = Router(["a", "b"])
    assert router.acquire("talk") == "a"
    for _ in range(5):
        assert router.acquire("talk") == "a"
    assert router.in_flight == {"a": 6, "b": 0}


def test_idle_engines_with_equal_load_share_the_sessions():
    router = Router(["a", "b"])
    for i in range(10):
        router.release(router.acquire(f"s{i}"))
    assert [router.acquire(f"s{i}") for i in range(10)] == ["a", "b"] * 5


def test_an_avoided_engine_gets_nothing_until_it_is_used_again():
    router = Router(["a", "b"])
    assert router.acquire("talk") == "a"
    router.avoid("a")
    assert router.acquire("talk") == "b"
    router.use("a")
    assert router.acquire("talk") == "b"  # its cache is there now
    assert router.acquire("other") == "a"
    router.avoid("a")
    router.avoid("b")
    with pytest.raises(NoEngine):
        router.acquire("talk")


def test_sessions_heard_of_longest_ago_are_forgotten_first():
    router = Router(["a", "b"], remembered=2)
    assert router.acquire("one") == "a"
    assert router.acquire("two") == "b"
    router.acquire("one")
    assert router.acquire("three") == "b"  # forgets two
    router.release("b")
    router.release("b")
    assert router.acquire("one") == "a"
    assert router.acquire("two") == "b"
