"""Advantages of plain arrays: what the estimators give the engine, and refusals of what would be another estimate."""

from typing import Any

import numpy as np
import pytest

from skyrl_engine import advantage
from skyrl_engine.contracts import AdvantageClaims
from skyrl_engine.errors import DataError, EngineError, UnsupportedError
from skyrl_engine.interop import compute_advantages

REWARDS = [1.0, 0.0, 3.0, 2.0, 2.0]
GROUPS = ["a", "b", "a", "b", "a"]


def test_grpo_is_its_formula() -> None:
    """(r - mean) / (std + 1e-6) of the group, with the sample's standard deviation (Shao et al. 2024), to float32's rounding."""
    due = np.zeros(5)
    for name in "ab":
        members = np.array([group == name for group in GROUPS])
        own = np.array(REWARDS)[members]
        due[members] = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    got = compute_advantages(REWARDS, GROUPS, options={"epsilon": 1e-6})
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, due, rtol=1e-6, atol=1e-7)


def test_rloo_of_any_labels_and_order() -> None:
    got = compute_advantages(np.array([1, 4, 2, 6]), np.array([7, -1, 7, -1]), "rloo")
    assert got.tolist() == [-1.0, -2.0, 1.0, 2.0]


def test_tokens_and_columns() -> None:
    """With gamma = lambda = 1, the advantage of a token is what is left of the reward, without its value."""
    values = np.array([0.5, 0.25, 0.0, 1.0], dtype=np.float32)
    got = compute_advantages(
        [0.0, 2.0, 0.0, 1.0],
        [0, 1],
        "gae",
        lengths=[2, 2],
        columns={"old_values": values},
        options={"gamma": 1.0, "lam": 1.0, "normalize": "none"},
    )
    assert got.tolist() == [1.5, 1.75, 1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "keywords", "kind", "words"),
    [
        (([1.0, 2.0], [0]), {}, DataError, r"rewards are float64\[2\] where 1 numbers are due"),
        (([1.0, float("nan")], [0, 0]), {}, DataError, "rewards have nan at place 1"),
        ((["1", "2"], [0, 0]), {}, DataError, "rewards are <U1"),
        (([], []), {}, DataError, r"groups have the shape \[0\]"),
        (([1.0, 2.0], [[0], [0]]), {}, DataError, r"groups have the shape \[2, 1\]"),
        (([1.0, 2.0], [0, 1]), {}, UnsupportedError, "grpo.* compares the attempts of a group, and one group has a single attempt"),
        (([1.0, 2.0], [0, 0]), {"lengths": [1, 0]}, DataError, r"lengths are \[1, 0\] for 2 attempts"),
        (([1.0, 2.0], [0, 0], "gae"), {}, UnsupportedError, r"gae.* needs old_values.*columns=\{'old_values'"),
        (([1.0, 2.0], [0, 0]), {"columns": {"old_values": [0.0, 0.0]}}, UnsupportedError, "does not read the column 'old_values'"),
        (([1.0, 2.0], [0, 0], "gdpo"), {}, UnsupportedError, "reads the parts of rewards"),
        (([1.0, 2.0], [0, 0], "nothing"), {}, EngineError, "nothing"),
        (([1.0, 2.0], [0, 0]), {"options": {"wrong": 1}}, EngineError, "wrong"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arguments: Any, keywords: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        compute_advantages(*arguments, **keywords)


def test_an_estimator_of_ones_own() -> None:
    @advantage(claims=AdvantageClaims(groups="ignored"))
    def own(batch, config):  # type: ignore[no-untyped-def] # as an author writes it
        return batch.spread(batch.trajectory_rewards() - 1)

    assert compute_advantages([3.0, 5.0], [0, 1], own).tolist() == [2.0, 4.0]
