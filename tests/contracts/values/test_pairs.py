"""Units become pairs by role, wherever their samples are; what is no pair is refused with its samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.values.pairs import pair_places, roles_in
from skyrl_engine.errors import DataError


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


@given(st.permutations(range(8)))
def test_pairs_are_found_in_any_order_of_samples(order: list[int]) -> None:
    """Sample i of unit i // 2 is chosen where i is even; places follow the samples."""
    where = np.argsort(order)
    places = pair_places(ints(*order) // 2, ints(*order) % 2, ints(*[3] * 8), ints(*order))
    assert sorted(map(tuple, places.tolist())) == sorted((int(where[i]), int(where[i + 1])) for i in (0, 2, 4, 6))


def test_a_unit_without_a_token_is_no_pair() -> None:
    """Fillers have no role that counts; a pair with one empty half stays a pair."""
    places = pair_places(ints(5, 9, 5, 7), ints(1, 1, 0, 0), ints(2, 0, 0, 0), ints(0, 1, 2, 3))
    assert places.tolist() == [[2, 0]]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((0, 1, 0, 0), r"unit 4 has no rejected sample, only the samples 12 \(chosen\), 13 \(chosen\)"),
        ((0, 1, 1, 1), r"unit 4 has no chosen sample, only the samples 12 \(rejected\), 13 \(rejected\)"),
    ],
)
def test_a_missing_role_names_the_samples(roles: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pair_places(ints(3, 3, 4, 4), ints(*roles), ints(1, 1, 1, 1), ints(10, 11, 12, 13))


def test_a_doubled_role_names_the_samples() -> None:
    with pytest.raises(DataError, match=r"unit 3 has a role twice, only the samples 0 \(chosen\), 1 \(rejected\), 2 \(rejected\)"):
        pair_places(ints(3, 3, 3), ints(0, 1, 1), ints(1, 1, 1), ints(0, 1, 2))


@pytest.mark.parametrize("roles", [np.array([0.0, 2.0]), np.array(["chosen", "rejected"], dtype=object)])
def test_other_roles_are_refused(roles: np.ndarray) -> None:
    with pytest.raises(DataError, match="is neither 0"):
        roles_in({"role": roles})


def test_roles_may_be_floats_and_absent() -> None:
    assert roles_in({}) is None
    roles = roles_in({"role": np.array([1.0, 0.0])})
    assert roles is not None
    assert roles.dtype == np.int64
    assert roles.tolist() == [1, 0]
