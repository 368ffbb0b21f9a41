"""One rule says which rewards are a tie, and estimators, filters and metrics see the same ties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts import AdvantageBatch, GroupView, are_tied, equalize_ties
from skyrl_engine.contracts.values.ties import TIE


@pytest.mark.parametrize(
    ("totals", "tied"),
    [
        ([10.3, 10.1 + 0.2], True),
        ([1.0, 1.0 + 9e-13], True),
        ([1.0, 1.0 + 2e-12], False),
        ([-1e6, -1e6 - 9e-7], True),
        ([-1e6, -1e6 - 2e-6], False),
        ([0.0, 1e-300], False),
        ([0.0, -0.0], True),
    ],
)
def test_a_tie_is_a_share_of_the_largest_reward(totals: list[float], tied: bool) -> None:
    equalized = equalize_ties(np.array(totals), np.abs(totals))
    assert bool(equalized[0] == equalized[1]) is tied
    assert are_tied(min(totals), max(totals), max(map(abs, totals))) is tied


def test_turns_that_cancel_out_are_measured_by_what_was_added_up() -> None:
    """0.1 + 0.2 - 0.3 is 5.6e-17 and not 0: rounding, of rewards of 0.3."""
    equalized = equalize_ties(np.array([0.1 + 0.2 - 0.3, 0.0]), np.array([0.3, 0.3]))
    assert equalized.tolist() == [0.0, 0.0]


@given(
    data=st.lists(
        st.tuples(st.integers(0, 3), st.floats(-1e6, 1e6) | st.sampled_from((10.3, 10.1 + 0.2, 0.3, 0.1 + 0.2))), max_size=12
    ),
    seed=st.integers(0, 99),
)
def test_groups_are_apart_and_the_order_changes_nothing(data: list[tuple[int, float]], seed: int) -> None:
    groups = np.array([group for group, _ in data], dtype=np.int64)
    totals = np.array([total for _, total in data])
    equalized = equalize_ties(totals, np.abs(totals), groups)
    order = np.random.default_rng(seed).permutation(len(data))
    assert equalize_ties(totals[order], np.abs(totals)[order], groups[order]).tolist() == equalized[order].tolist()
    for group in range(4):
        own = groups == group
        assert equalize_ties(totals[own], np.abs(totals[own])).tolist() == equalized[own].tolist()
        largest = np.abs(totals[own]).max(initial=0.0)
        assert (np.abs(equalized[own] - totals[own]) <= len(data) * TIE * largest).all()
        for one, at in zip(totals[own], equalized[own], strict=True):
            assert all(
                (there == at) for other, there in zip(totals[own], equalized[own], strict=True) if abs(one - other) <= TIE * largest
            )


def batch(*turns: tuple[float, ...]) -> AdvantageBatch:
    """One group; an attempt per argument, a sample per turn, a token per sample."""
    rewards = np.array([reward for rewards_of_turn in turns for reward in rewards_of_turn])
    numbers = np.repeat(np.arange(len(turns)), [len(rewards_of_turn) for rewards_of_turn in turns])
    return AdvantageBatch(
        rewards=rewards,
        loss_weight=np.ones(len(rewards), dtype=np.uint8),
        action_offsets=np.arange(len(rewards) + 1),
        group_ids=np.zeros(len(rewards), dtype=np.int64),
        trajectory_ids=numbers,
        turn=np.concatenate([np.arange(len(rewards_of_turn)) for rewards_of_turn in turns]),
        finished=np.ones(len(rewards), dtype=np.bool_),
    )


def test_estimators_and_filters_see_the_same_ties() -> None:
    assert batch((10.1, 0.2), (10.3,), (5.0,)).trajectory_rewards().tolist() == [10.1 + 0.2, 10.1 + 0.2, 5.0]
    view = GroupView("sums", np.array([10.3, 10.1 + 0.2, 5.0]), *[np.zeros(3, dtype=np.bool_)] * 3)
    assert view.rewards.tolist() == [10.1 + 0.2, 10.1 + 0.2, 5.0]


def test_an_attempt_that_failed_is_no_measure() -> None:
    spoilt = batch((1.0,), (1.0 + 1e-9,), (1e9,))
    object.__setattr__(spoilt, "finished", np.array([True, True, False]))
    assert spoilt.trajectory_rewards().tolist() == [1.0, 1.0 + 1e-9, 1e9]
