"""Weights against the formulas written as loops, the four-sequence example, and what is refused."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.ragged import offsets_of
from skyrl_engine.contracts.reducer import BatchStructure
from skyrl_engine.errors import DataError
from skyrl_engine_reducers.plugin import MeanConfig, sum_reducer, token_mean


def structure_of(rows: list[list[float]], dtype: type = np.float32, **fields: object) -> BatchStructure:
    count = len(rows)
    return BatchStructure(
        loss_weight=np.array([weight for row in rows for weight in row], dtype=dtype),
        action_offsets=offsets_of([len(row) for row in rows]),
        group_ids=np.arange(count),
        unit_ids=np.arange(count),
        micro_batch=np.arange(count),
        **fields,
    )


def made(plugin: object, config: object = None) -> object:
    return plugin.skyrl_engine_make_reducer(config)


ROWS = st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.5, 0.25, 3.0]), max_size=6), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_token_mean_is_its_formula(rows: list[list[float]]) -> None:
    """Weights are multiples of 1/4, so the loop's float64 sums are exact and equality is too."""
    total = sum(sum(row) for row in rows)
    wanted = [weight / (total or 1) for row in rows for weight in row]
    weights = made(token_mean, MeanConfig()).weights(structure_of(rows))
    assert weights.dtype == np.float64
    assert weights.tolist() == wanted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, -1.0, -0.3, 2.5]), max_size=6), min_size=1, max_size=6))
def test_sum_is_the_loss_weight(rows: list[list[float]]) -> None:
    structure = structure_of(rows)
    weights = made(sum_reducer).weights(structure)
    assert weights.dtype == np.float64
    assert weights.tolist() == structure.loss_weight.tolist()


def test_the_four_sequence_example() -> None:
    """8, 3, 1 and 0 valid tokens: every valid token weighs 1/12, whatever its sequence; the empty one changes nothing."""
    rows = [[1] * 8, [1] * 3, [1], [0, 0]]
    weights = made(token_mean, MeanConfig("skip")).weights(structure_of(rows, np.uint8))
    assert weights.tolist() == [1 / 12] * 12 + [0, 0]
    assert made(sum_reducer).weights(structure_of(rows, np.uint8)).tolist() == [1] * 12 + [0, 0]


def test_a_uniform_weight_changes_nothing_in_a_mean() -> None:
    ones = made(token_mean, MeanConfig()).weights(structure_of([[1, 1, 0], [1]]))
    halves = made(token_mean, MeanConfig()).weights(structure_of([[0.5, 0.5, 0], [0.5]]))
    assert ones.tolist() == halves.tolist()


def test_a_batch_without_loss_weighs_nothing() -> None:
    assert made(token_mean, MeanConfig()).weights(structure_of([[0, 0], [0]], np.uint8)).tolist() == [0, 0, 0]


def test_the_cut_into_micro_batches_does_not_matter() -> None:
    one = structure_of([[1, 1], [1], [0.5]])
    cut = evolve(one, micro_batch=np.zeros(3, dtype=np.int64))
    reducer = made(token_mean, MeanConfig())
    assert reducer.weights(one).tolist() == reducer.weights(cut).tolist()


def test_token_mean_refuses_a_negative_weight_and_names_the_sample() -> None:
    structure = structure_of([[1, 1], [], [1, -0.5]], sample_ids=np.array([40, 41, 42]))
    with pytest.raises(DataError, match=r"sample 42 has the loss weight -0\.5 at response token 1.*'token_mean'"):
        made(token_mean, MeanConfig()).weights(structure)


def test_the_option_is_declared_and_checked() -> None:
    assert made(token_mean, MeanConfig()).empty_sequence == "count"
    assert made(token_mean, MeanConfig("skip")).empty_sequence == "skip"
    assert made(sum_reducer).empty_sequence == "count"
    assert token_mean.skyrl_engine_config_schema() is MeanConfig
    with pytest.raises(ValueError, match="empty_sequence"):
        MeanConfig("drop")
