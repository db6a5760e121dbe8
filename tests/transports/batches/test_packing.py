import random
from itertools import pairwise

import numpy as np
import pytest

from megatron_rl.transports.batches.packing import ATTENTION_COST, first_fit_decreasing, pack, padding_fraction
from megatron_rl.transports.batches.records import STREAMS, TrainingSample


def sample(name, tokens, first=0, **streams):
    """The first token of a sample is never sampled; of the others, two of three are."""
    ids = np.arange(first, first + tokens)
    mask = (ids % 3 != 0) & (ids > first)
    return TrainingSample(name, name, {"token_ids": ids, "loss_mask": mask, "advantages": ids * 0.5, **streams})


def samples(seed, n=40, longest=100):
    rng = random.Random(seed)
    first, out = 0, []
    for i in range(n):
        tokens = rng.randint(1, longest)
        out.append(sample(f"s{i}", tokens, first))
        first += tokens
    return out


def documents(micro_batches):
    """name -> (token ids, advantages) of every sample, as packed."""
    found = {}
    for m in micro_batches:
        for name, (start, end) in zip(m.sample_ids, pairwise(m.cu_seqlens.tolist()), strict=bool(m.sample_ids)):
            assert name not in found
            found[name] = (m.streams["token_ids"][start:end].tolist(), m.streams["advantages"][start:end].tolist())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_sample_is_packed_once_whole_within_capacity_as_many_for_each_rank(ranks, keep_order, seed):
    given = samples(seed)
    packed = pack(given, 3, 2, capacity=128, data_parallel=ranks, keep_order=keep_order)
    assert documents(packed) == {s.sample_id: (s.streams["token_ids"].tolist(), s.streams["advantages"].tolist()) for s in given}
    assert all(len(m) <= 128 for m in packed)
    assert len(packed) % ranks == 0
    assert all((m.step, m.policy_version, m.cu_seqlens.dtype, m.cu_seqlens[0]) == (3, 2, np.int32, 0) for m in packed)
    assert all(set(m.streams) == {row.name for row in STREAMS} for m in packed)
    assert all(m.streams[row.name].dtype == row.dtype and m.streams[row.name].shape == (len(m),) for m in packed for row in STREAMS)


def test_first_fit_decreasing_by_hand():
    bins = first_fit_decreasing([sample(str(n), n) for n in (4, 8, 1, 4, 2, 1)], 10)
    assert [[len(s) for s in b] for b in bins] == [[8, 2], [4, 4, 1, 1]]


@pytest.mark.parametrize("seed", range(5))
def test_first_fit_decreasing_is_within_its_bound_of_the_least_possible(seed):
    given = samples(seed)
    least = -(-sum(map(len, given)) // 128)
    assert len(first_fit_decreasing(given, 128)) <= 11 / 9 * least + 1


def test_denominators_do_not_depend_on_the_packing():
    given = samples(1)
    expected = {"rl": float(sum(int((s.streams["token_ids"][1:] % 3 != 0).sum()) for s in given))}
    for capacity, ranks, keep_order in ((100, 1, False), (128, 4, True), (4096, 3, False)):
        packed = pack(given, 1, 0, capacity=capacity, data_parallel=ranks, keep_order=keep_order)
        assert all(m.denominators == expected for m in packed)
        assert sum(float(m.streams["rl_weights"].sum()) for m in packed) == expected["rl"]


def test_denominators_are_float64_sums_of_weights_and_a_component_without_weight_is_absent():
    tiny, sampled = np.array([0, 1e-8, 1e-8], np.float32), [False, True, True]
    given = [
        sample("a", 3, loss_mask=sampled, rl_weights=[0, 1e8, 0], ce_weights=tiny),
        sample("b", 3, loss_mask=sampled, rl_weights=tiny),
    ]
    (m,) = pack(given, 1, 0, capacity=10, data_parallel=1)
    assert m.denominators == {"rl": 1e8 + 2 * float(tiny[1]), "ce": 2 * float(tiny[1])}
    (m,) = pack([sample("a", 3, loss_mask=[False] * 3)], 1, 0, capacity=10, data_parallel=1)
    assert m.denominators == {}


def test_weights_count_on_sampled_tokens_only():
    (m,) = pack([sample("a", 3, loss_mask=[False, True, False], rl_weights=[5, 6, 7])], 1, 0, capacity=10, data_parallel=1)
    assert m.streams["rl_weights"].tolist() == [0, 6, 0] and m.denominators == {"rl": 6}


@pytest.mark.parametrize("streams", [{"loss_mask": [True, False]}, {"ce_weights": [1, 0]}])
def test_a_first_token_can_not_be_trained_on(streams):
    with pytest.raises(ValueError, match="sample a: its first token can't be trained on"):
        sample("a", 2, **streams)


def test_the_order_of_dispatch_is_kept_on_request():
    packed = pack([sample(str(i), n) for i, n in enumerate((6, 3, 5, 5, 1))], 1, 0, capacity=10, data_parallel=2, keep_order=True)
    assert [m.sample_ids for m in packed] == [["0", "1"], ["2", "3"], ["4"], []]
    assert not packed[3].streams["loss_mask"].any() and padding_fraction(packed) == 1 / 21


def test_bins_are_split_rather_than_padded_when_ranks_do_not_divide_them():
    packed = pack([sample(str(i), 10) for i in range(6)], 1, 0, capacity=30, data_parallel=4)
    assert len(packed) == 4 and all(m.sample_ids for m in packed) and padding_fraction(packed) == 0


def test_fewer_samples_than_ranks_leave_empty_micro_batches():
    packed = pack([sample("a", 9)], 1, 0, capacity=10, data_parallel=3)
    assert [m.sample_ids for m in packed] == [["a"], [], []]
    assert padding_fraction(packed) == 2 / 11


@pytest.mark.parametrize("seed", range(6))
def test_ranks_get_shares_of_like_cost(seed):
    given, ranks = samples(seed, n=64), 4
    packed = pack(given, 1, 0, capacity=100, data_parallel=ranks)

    def cost(m):
        return sum((b - a) + ATTENTION_COST * (b - a) ** 2 for a, b in pairwise(m.cu_seqlens.tolist()))

    loads = [sum(map(cost, packed[rank::ranks])) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(map(cost, packed))
    assert max(loads) / (sum(loads) / ranks) < 1.12


def test_a_row_of_bins_is_dealt_costliest_to_the_rank_with_least():
    """No two of these fit together. In turn: 100 | 95, then 60 | 90 (the second rank had less), then 55 | 51."""
    packed = pack([sample(str(n), n) for n in (51, 55, 60, 90, 95, 100)], 1, 0, capacity=100, data_parallel=2)
    assert [[len(m) for m in packed[rank::2]] for rank in range(2)] == [[100, 60, 55], [95, 90, 51]]


def test_a_sample_longer_than_a_micro_batch_is_refused_by_name():
    with pytest.raises(ValueError, match="sample long has 11 tokens, a micro-batch holds 10; samples are never cut"):
        pack([sample("short", 2), sample("long", 11)], 1, 0, capacity=10, data_parallel=1)


def test_nothing_to_pack_is_refused():
    with pytest.raises(ValueError, match="step 4: no samples"):
        pack([], 4, 3, capacity=10, data_parallel=1)
