"""median_of_groups keeps the engine's promises about reducers, and gives the weights it says."""

from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve

from acme_median_of_groups.plugin import MedianOfGroupsConfig, median_of_groups
from skyrl_engine import BatchStructure, DataError
from skyrl_engine.contracts import offsets_of
from skyrl_engine.testing import ReducerConformance


class TestMedianOfGroups(ReducerConformance):
    plugin = "acme-median-of-groups:median_of_groups"


class TestMedianOfGroupsWithoutEmpty(ReducerConformance):
    plugin = "acme-median-of-groups:median_of_groups"
    options = {"empty_sequence": "skip"}  # noqa: RUF012 the suite reads it, nothing changes it


def structure_of(lengths: Sequence[int], groups: Sequence[int], empty: Sequence[int] = ()) -> BatchStructure:
    """Responses of these lengths; in those of `empty` no token carries loss."""
    weights = np.repeat([place not in empty for place in range(len(lengths))], lengths).astype(np.uint8)
    numbers = np.arange(len(lengths))
    return BatchStructure(weights, offsets_of(lengths), np.array(groups), numbers, 0 * numbers)


def masses(structure: BatchStructure, empty: str = "count") -> list[float]:
    """The sum of each response's weights."""
    weights = median_of_groups(structure, MedianOfGroupsConfig(empty_sequence=empty))
    return np.bincount(structure.sequence_index, weights=weights, minlength=len(structure)).tolist()


def test_the_median_response_counts_as_in_the_mean_over_sequences() -> None:
    """Groups of 4, 8, 40 tokens and of 2, 2: a group's median response weighs 1 / (groups x its responses), others by their length."""
    found = masses(structure_of([4, 8, 40, 2, 2], [7, 7, 7, 9, 9]))
    assert found == pytest.approx([0.5 / 6, 1 / 6, 5 / 6, 1 / 4, 1 / 4], rel=1e-15)


def test_one_response_that_runs_away_moves_no_other() -> None:
    usual, long = masses(structure_of([4, 8, 40], [0, 0, 0])), masses(structure_of([4, 8, 4000], [0, 0, 0]))
    assert usual[:2] == long[:2]


def test_tokens_of_one_group_count_alike() -> None:
    weights = median_of_groups(structure_of([3, 5, 1], [1, 1, 1]), MedianOfGroupsConfig())
    assert len(set(weights.tolist())) == 1


@pytest.mark.parametrize(("empty", "due"), [("count", [1 / 6, 1 / 6, 0, 0]), ("skip", [1 / 2, 1 / 2, 0, 0])])
def test_what_has_no_loss_is_counted_or_not(empty: str, due: list[float]) -> None:
    """A group of two responses and one without loss, and a group without any: 1 / (2 x 3) each, or 1 / (1 x 2)."""
    assert masses(structure_of([4, 4, 5, 3], [0, 0, 0, 1], empty=(2, 3)), empty) == pytest.approx(due, rel=1e-15)


def test_data_without_groups_is_refused() -> None:
    with pytest.raises(DataError, match="the data has no group ids"):
        median_of_groups(evolve(structure_of([1], [0]), grouped=False), MedianOfGroupsConfig())
