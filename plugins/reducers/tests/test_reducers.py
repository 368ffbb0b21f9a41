"""Weights against the formulas written as loops, what they sum to, what they do not depend on, and what is refused."""

from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import BatchStructure, FunctionReducer, offsets_of
from skyrl_engine_reducers.plugin import (
    MeanConfig,
    TokenSumNormConfig,
    batch_token_mean,
    group_mean,
    sequence_mean,
    sequence_mean_token_sum_norm,
    sum_reducer,
    token_mean,
    token_mean_legacy,
    trajectory_mean,
)

MAXIMUM = 10
Rows = list[list[float]]


def structure_of(rows: Rows, dtype: type = np.float32, **fields: object) -> BatchStructure:
    """A mini-batch of these loss weights; every sequence is a group, a unit and a micro-batch of its own unless `fields` say other."""
    own = np.arange(len(rows))
    arrays = {"group_ids": own, "unit_ids": own, "micro_batch": own, "max_sequence_length": MAXIMUM, **fields}
    flat = [weight for row in rows for weight in row]
    return BatchStructure(np.array(flat, dtype=dtype), offsets_of([len(row) for row in rows]), **arrays)


REDUCERS = {
    "sum": lambda _empty: sum_reducer.skyrl_engine_make_reducer(None),
    "token_mean": lambda empty: token_mean.skyrl_engine_make_reducer(MeanConfig(empty)),
    "batch_token_mean": lambda empty: batch_token_mean.skyrl_engine_make_reducer(MeanConfig(empty)),
    "token_mean_legacy": lambda empty: token_mean_legacy.skyrl_engine_make_reducer(MeanConfig(empty)),
    "sequence_mean": lambda empty: sequence_mean.skyrl_engine_make_reducer(MeanConfig(empty)),
    "sequence_mean_token_sum_norm": lambda empty: sequence_mean_token_sum_norm.skyrl_engine_make_reducer(TokenSumNormConfig(empty)),
    "group_mean": lambda empty: group_mean.skyrl_engine_make_reducer(MeanConfig(empty)),
    "trajectory_mean": lambda empty: trajectory_mean.skyrl_engine_make_reducer(MeanConfig(empty)),
}
names = pytest.mark.parametrize("name", REDUCERS)
empties = pytest.mark.parametrize("empty", ["count", "skip"])


def made(name: str, empty: str = "count") -> FunctionReducer:
    return REDUCERS[name](empty)


def by_loops(name: str, empty: str, structure: BatchStructure) -> list[float]:
    """The table of the formulas, one token at a time."""
    bounds = structure.action_offsets.tolist()
    rows = [structure.loss_weight[first:last].astype(float).tolist() for first, last in pairwise(bounds)]
    mass = [sum(row) for row in rows]
    parts = {
        "token_mean_legacy": structure.micro_batch,
        "sequence_mean": np.arange(len(rows)),
        "sequence_mean_token_sum_norm": np.arange(len(rows)),
        "group_mean": structure.group_ids,
        "trajectory_mean": structure.trajectory_ids,
    }.get(name, np.zeros(len(rows)))
    counted = {part for part, row in zip(parts.tolist(), rows, strict=True) if empty == "count" or any(row)}
    weights = []
    for i, row in enumerate(rows):
        mass_of_part = sum(mass for part, mass in zip(parts, mass, strict=True) if part == parts[i])
        for weight in row:
            match name:
                case "sum":
                    weights.append(weight)
                case "token_mean" | "batch_token_mean":
                    weights.append(weight / (sum(mass) or 1))
                case "sequence_mean_token_sum_norm":
                    weights.append(weight / ((len(counted) or 1) * MAXIMUM))
                case _:
                    weights.append(weight / ((len(counted) or 1) * (mass_of_part or 1)))
    return weights


@st.composite
def structures(draw: st.DrawFn, weights: tuple[float, ...] = (0.0, 1.0, 0.5, 0.25, 3.0)) -> BatchStructure:
    """Sequences with empty ones among them, over some micro-batches (not all numbers are used) and groups; 0/1 weights as uint8."""
    rows = draw(st.lists(st.lists(st.sampled_from(weights), max_size=6), min_size=1, max_size=6))
    labels = st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)).map(np.array)
    dtype = np.uint8 if draw(st.booleans()) and {weight for row in rows for weight in row} <= {0, 1} else np.float32
    ids = {"group_ids": draw(labels) * 2**40, "trajectory_ids": draw(labels) * 2**40}
    return structure_of(rows, dtype, micro_batch=np.sort(draw(labels)), **ids)


@names
@empties
@given(structures())
def test_weights_are_their_formula(name: str, empty: str, structure: BatchStructure) -> None:
    """Loss weights are multiples of 1/4, so sums are exact in every order and each weight is one correctly rounded division."""
    weights = made(name, empty).weights(structure)
    assert weights.dtype == np.float64
    assert weights.tolist() == by_loops(name, empty, structure)


@empties
@given(structures())
def test_weights_sum_as_documented(empty: str, structure: BatchStructure) -> None:
    """A mean's weights sum to the share of its parts that carry loss: 1 where every counted part does. rel 1e-12: a few hundred roundings."""

    def share(parts: np.ndarray) -> float:
        carrying = len(np.unique(parts[~structure.empty]))
        counted = carrying if empty == "skip" else len(np.unique(parts))
        return carrying / counted if counted else 0.0

    mass = structure.mass.sum()
    counted = len(structure) if empty == "count" else max(1, np.count_nonzero(~structure.empty))
    expected = {
        "sum": mass,
        "token_mean": float(mass > 0),
        "batch_token_mean": float(mass > 0),
        "token_mean_legacy": share(structure.micro_batch),
        "sequence_mean": share(np.arange(len(structure))),
        "sequence_mean_token_sum_norm": mass / (counted * MAXIMUM),
        "group_mean": share(structure.group_ids),
        "trajectory_mean": share(structure.trajectory_ids),
    }
    for name, total in expected.items():
        assert made(name, empty).weights(structure).sum() == pytest.approx(total, rel=1e-12), name


@names
@given(structures(), st.data())
def test_the_cut_does_not_matter_unless_declared(name: str, structure: BatchStructure, data: st.DataObject) -> None:
    cut = data.draw(st.lists(st.integers(0, 3), min_size=len(structure), max_size=len(structure)))
    other_structure = evolve(structure, micro_batch=np.sort(np.array(cut)))
    reducer = made(name)
    assert reducer.batch_local or reducer.weights(structure).tolist() == reducer.weights(other_structure).tolist()


def test_exactly_one_reducer_declares_that_it_depends_on_the_cut_and_it_does() -> None:
    assert [name for name in REDUCERS if made(name).batch_local] == ["token_mean_legacy"]
    structure = structure_of([[1, 1, 1], [1]], micro_batch=np.zeros(2, dtype=np.int64))
    two = evolve(structure, micro_batch=np.arange(2))
    legacy = made("token_mean_legacy")
    assert legacy.weights(structure).tolist() == [1 / 4] * 4
    assert legacy.weights(two).tolist() == [1 / 6] * 3 + [1 / 2]


@names
@empties
@given(structures(), st.data())
def test_the_order_of_sequences_does_not_matter(name: str, empty: str, structure: BatchStructure, data: st.DataObject) -> None:
    """Weights move with their tokens; exact, because sums of multiples of 1/4 are."""
    order = data.draw(st.permutations(range(len(structure))))
    tokens = np.split(np.arange(len(structure.loss_weight)), structure.action_offsets[1:-1])
    moved = np.concatenate([tokens[i] for i in order]).astype(np.int64)
    shuffled = evolve(
        structure,
        loss_weight=structure.loss_weight[moved],
        action_offsets=offsets_of([len(tokens[i]) for i in order]),
        group_ids=structure.group_ids[order],
        unit_ids=structure.unit_ids[order],
        micro_batch=structure.micro_batch[order],
        sample_ids=structure.sample_ids[order],
        trajectory_ids=structure.trajectory_ids[order],
    )
    reducer = made(name, empty)
    assert reducer.weights(shuffled).tolist() == reducer.weights(structure)[moved].tolist()


@names
@given(structures(weights=(0.0, 1.0)), st.sampled_from([0.5, 0.125, 3.0]))
def test_a_uniform_weight_changes_nothing_in_a_mean(name: str, structure: BatchStructure, factor: float) -> None:
    """Counts truncated to whole numbers, a known fault, would make masses of 0.5 vanish or divide by 1. Sums keep the factor."""
    scaled = evolve(structure, loss_weight=structure.loss_weight.astype(np.float32) * np.float32(factor))
    reducer = made(name)
    wanted = reducer.weights(structure) * (factor if name in ("sum", "sequence_mean_token_sum_norm") else 1)
    np.testing.assert_allclose(reducer.weights(scaled), wanted, rtol=1e-15)


@empties
@given(structures())
def test_whole_attempts_are_sequences(empty: str, structure: BatchStructure) -> None:
    """The two means are the same to the bit where no history was rewritten."""
    alone = evolve(structure, trajectory_ids=np.arange(len(structure), dtype=np.int64)[::-1] * 3)
    wanted = made("sequence_mean", empty).weights(structure)
    assert made("trajectory_mean", empty).weights(alone).tobytes() == wanted.tobytes()


def test_stretches_of_one_attempt_count_once() -> None:
    """An attempt of 3 + 1 tokens in two sequences, and one of 2 in one: 1/2 each, whatever they were cut into."""
    structure = structure_of([[1, 1, 1], [1], [1, 1]], np.uint8, trajectory_ids=np.array([7, 7, 4]))
    assert made("trajectory_mean").weights(structure).tolist() == [1 / 8] * 4 + [1 / 4] * 2
    assert made("sequence_mean").weights(structure).tolist() == [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2


def test_tokens_of_all_steps_of_a_batch_count_alike() -> None:
    """Steps of 6 and of 2 tokens: 4 on average, so that a token of either weighs 1/4, and a batch without loss weighs nothing."""
    structure = structure_of([[1, 1, 1], [1], [1, 1]], np.uint8, mean_mass=4.0)
    assert made("batch_token_mean").weights(structure).tolist() == [1 / 4] * 6
    assert made("token_mean").weights(structure).tolist() == [1 / 6] * 6
    assert made("batch_token_mean").weights(structure_of([[0, 0]], np.uint8, mean_mass=0.0)).tolist() == [0.0, 0.0]


def test_masses_are_summed_in_float64() -> None:
    """2^24 + 1 + 1 is 2^24 in float32, one term after the other; the mass is exact."""
    structure = structure_of([[2.0**24, 1.0, 1.0]])
    for name in ("token_mean", "batch_token_mean", "token_mean_legacy", "sequence_mean", "group_mean", "trajectory_mean"):
        assert made(name).weights(structure).tolist() == [2**24 / (2**24 + 2), *[1 / (2**24 + 2)] * 2], name


@names
@empties
def test_a_batch_without_loss_weighs_nothing(name: str, empty: str) -> None:
    for rows in ([[0, 0], [0]], [[], []], []):
        weights = made(name, empty).weights(structure_of(rows, np.uint8))
        assert weights.dtype == np.float64
        assert weights.tolist() == [0] * sum(map(len, rows))


@names
def test_an_extreme_weight_stays_finite(name: str) -> None:
    """The smallest float32 above 0, and weights whose float32 sum would be infinite."""
    tiny, huge = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)
    for rows in ([[tiny], [0.0]], [[huge, huge], [huge]]):
        assert np.isfinite(made(name).weights(structure_of(rows))).all()


@given(structures(weights=(0.0, 1.0, -1.0, -0.5)))
def test_only_sum_takes_negative_weights(structure: BatchStructure) -> None:
    assert made("sum").weights(structure).tolist() == structure.loss_weight.tolist()
    assume((structure.loss_weight < 0).any())
    for name in REDUCERS.keys() - {"sum"}:
        with pytest.raises(DataError, match=r"sample \d has the loss weight -.*the reducer"):
            made(name).weights(structure)


def test_a_negative_weight_names_the_sample() -> None:
    structure = structure_of([[1, 1], [], [1, -0.5]], sample_ids=np.array([40, 41, 42]))
    with pytest.raises(DataError, match=r"sample 42 has the loss weight -0\.5 at response token 1.*'token_mean'"):
        made("token_mean").weights(structure)


def test_the_own_maximum_length_comes_before_the_run_s() -> None:
    structure = structure_of([[1, 1], [1]], max_sequence_length=8)
    own = sequence_mean_token_sum_norm.skyrl_engine_make_reducer(TokenSumNormConfig(max_sequence_length=4))
    assert own.weights(structure).tolist() == [1 / (2 * 4)] * 3
    assert made("sequence_mean_token_sum_norm").weights(structure).tolist() == [1 / (2 * 8)] * 3
    assert own.weights(evolve(structure, max_sequence_length=None)).tolist() == [1 / (2 * 4)] * 3


def test_no_maximum_length_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"none is set. Set reducer.max_sequence_length"):
        made("sequence_mean_token_sum_norm").weights(structure_of([[1]], max_sequence_length=None))


def test_no_group_ids_are_refused() -> None:
    with pytest.raises(DataError, match=r"the data has no group ids.*Give every sample a group id"):
        made("group_mean").weights(structure_of([[1], [1]], grouped=False))


def test_options_are_declared_and_checked() -> None:
    for name in REDUCERS.keys() - {"sum"}:
        assert [made(name, empty).empty_sequence for empty in ("count", "skip")] == ["count", "skip"]
    assert made("sum").empty_sequence == "count"
    with pytest.raises(ValueError, match="empty_sequence"):
        MeanConfig("drop")
    with pytest.raises(ValueError, match="max_sequence_length"):
        TokenSumNormConfig(max_sequence_length=0)


def test_masses_far_below_1_divide_too() -> None:
    """Fractional weights that add up to less than a thousandth: the mean over them is the same mean."""
    structure = structure_of([[1e-5, 3e-5], [2e-4]])
    for name, expected in {
        "token_mean": [1 / 24, 3 / 24, 20 / 24],
        "sequence_mean": [1 / 8, 3 / 8, 1 / 2],
        "trajectory_mean": [1 / 8, 3 / 8, 1 / 2],
    }.items():
        np.testing.assert_allclose(made(name).weights(structure), expected, rtol=1e-6, err_msg=name)
