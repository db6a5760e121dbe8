from itertools import combinations
from math import comb

import pytest

from megatron_rl.evals.pass_at_k import pass_at_k, powers_of_two


def test_it_is_the_share_of_all_choices_of_k_samples_with_one_that_is_right():
    for n in range(1, 8):
        for correct in range(n + 1):
            right = [i < correct for i in range(n)]
            for k in range(1, n + 1):
                hits = sum(any(choice) for choice in combinations(right, k))
                assert pass_at_k(n, correct, k) == pytest.approx(hits / comb(n, k), abs=1e-12)


def test_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs hold the right one
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_impossible_counts_are_refused(n, correct, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, correct, k)


def test_powers_of_two_up_to_the_group_size():
    assert [powers_of_two(n) for n in (0, 1, 2, 3, 8, 9)] == [[], [1], [1, 2], [1, 2], [1, 2, 4, 8], [1, 2, 4, 8]]
