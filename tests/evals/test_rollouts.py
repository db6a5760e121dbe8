import asyncio

from scripted_policy import ScriptedPool

from megatron_rl.evals.rollouts import EngineSampler, derive_seed


def seeds_of(seed):
    pool = ScriptedPool(lambda prompt, s: "x", version=0)
    sampler = EngineSampler(pool, "group-1", 0.5, seed, "7")
    for _ in range(3):
        asyncio.run(sampler([1, 2], 4))
    assert {(r["session"], r["salt"], r["temperature"], r["max"]) for r in pool.requests} == {("group-1", "7", 0.5, 4)}
    return [r["seed"] for r in pool.requests]


def test_turns_of_a_rollout_share_its_session_and_have_seeds_of_their_own():
    assert len(set(seeds_of(5))) == 3
    assert seeds_of(5) == seeds_of(5)
    assert not set(seeds_of(5)) & set(seeds_of(6))


def test_a_seed_depends_on_each_part_and_its_place():
    parts = [(0, "a", 1, 2), (0, "a", 12, None), (0, "a", 1, 3), (1, "a", 1, 2), (0, "a1", 1, 2), (0, "a", 2, 1)]
    assert len({derive_seed(*p) for p in parts}) == len(parts)
    assert all(0 <= derive_seed(*p) < 2**63 for p in parts)
