"""Proof P21: pass@k is the share of sets of k attempts that hold a right one, and intervals hold the truth as often as they say."""

from itertools import combinations

import numpy as np
import pytest

from skyrl_engine.rollout.pass_at_k import estimate, majority, pass_at_k


@pytest.mark.parametrize("attempts", range(1, 9))
def test_it_is_the_share_of_subsets_that_hold_a_right_one(attempts):
    for right in range(attempts + 1):
        outcomes = [place < right for place in range(attempts)]
        for k in range(1, attempts + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(attempts, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_it_estimates_the_chance_without_bias():
    """The mean over all outcomes of 6 attempts, each right with the chance 0.3, is the chance that one of k is."""
    chance, attempts = 0.3, 6
    for k in range(1, attempts + 1):
        expected = 0.0
        for outcome in range(2**attempts):
            right = outcome.bit_count()
            expected += chance**right * (1 - chance) ** (attempts - right) * pass_at_k(attempts, right, k)
        assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


@pytest.mark.parametrize(("attempts", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_cannot_be_is_refused(attempts, right, k):
    with pytest.raises(ValueError, match="attempts"):
        pass_at_k(attempts, right, k)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("4", True), ("4", True), ("5", False)], 1.0),
        ([("4", True), ("5", False), ("5 ", False)], 0.0),
        ([("4", True), ("5", False)], 0.5),
        ([("4", True), ("4", True), ("5", False), ("5", False), ("6", False), ("6", False)], 1 / 3),
        ([(None, False), (None, False), ("4", True)], 1.0),
        ([(None, False), (None, True)], 0.0),
        ([], 0.0),
        ([("4", True), ("4", False), ("5", True)], 0.5),
    ],
)
def test_the_most_common_answer_is_voted_for(votes, expected):
    assert majority(votes) == pytest.approx(expected)
    assert majority(votes[::-1]) == pytest.approx(expected), "whichever came first"


def test_many_attempts_do_not_overflow():
    assert 0.99 < pass_at_k(10_000, 5_000, 100) <= 1.0


def test_intervals_are_those_of_the_seed():
    values = list(np.random.Generator(np.random.PCG64(1)).random(40))
    assert estimate(values, seed=3) == estimate(values, seed=3)
    assert estimate(values, seed=3) != estimate(values, seed=4)
    one = estimate([0.5])
    assert (one.mean, one.low, one.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no task"):
        estimate([])


def test_intervals_hold_the_truth():
    """200 samples of 60 tasks; a share of 95 % has the standard deviation of 1.5 %."""
    generator = np.random.Generator(np.random.PCG64(0))
    held = 0
    for seed in range(200):
        found = estimate(generator.random(60), seed=seed, resamples=500)
        held += found.low <= 0.5 <= found.high
    assert 0.90 <= held / 200 <= 0.99


def test_pieces_of_bounded_memory_change_no_number(monkeypatch):
    values = list(np.linspace(0, 1, 50))
    whole = estimate(values, seed=1)
    monkeypatch.setattr("skyrl_engine.rollout.pass_at_k._PIECE", 50 * 7)
    assert estimate(values, seed=1) == whole
