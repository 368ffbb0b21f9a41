"""The golden example: four sequences with 8, 3, 1 and 0 valid tokens, every reducer, both ways to count the empty one.

Published engines give different numbers for one mode name, so each number here is derived by hand:

- `sum`: 1 each.
- `token_mean`: M = 8 + 3 + 1 + 0 = 12, so 1/12 each. Sequences are not counted: the same both ways.
- `token_mean_legacy`, micro-batches {8, 3} and {1, 0}: M_k = 11 and 1, K = 2, so 1/(2 * 11) and 1/(2 * 1). Both micro-batches carry loss:
  the same both ways. With micro-batches {8, 3, 1} and {0}: M_k = 12 and 0; the second is counted (K = 2: 1/24) or skipped (K = 1: 1/12).
- `sequence_mean`: n = 4 counted, 3 skipped; 1/(n * 8), 1/(n * 3), 1/(n * 1).
- `sequence_mean_token_sum_norm` with a maximum of 10: 1/(n * 10), so 1/40 or 1/30.
- `group_mean` with the groups {8, 3} and {1, 0}: M_g = 11 and 1, G = 2, both ways, so 1/22 and 1/2. With {8, 3, 1} and {0}: 1/24 or 1/12.

What this does not cover: fractional weights and the cut by a real plan, which have tests of their own.
"""

import numpy as np
import pytest

from skyrl_engine.contracts import MiniBatchPlan, Reducer, SampleColumns, offsets_of, one_sample_per_row
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers.dispatch import batch_structure, token_weights
from skyrl_engine_reducers.plugin import (
    MeanConfig,
    TokenSumNormConfig,
    group_mean,
    sequence_mean,
    sequence_mean_token_sum_norm,
    sum_reducer,
    token_mean,
    token_mean_legacy,
)

VALID = (8, 3, 1, 0)
MASKED = 2
"""Response tokens of each sequence that carry no loss; they weigh 0 whatever the reducer."""


def columns_of(group_ids: list[int] | None) -> SampleColumns:
    """A prompt of one token, then the valid tokens, then two masked ones."""
    lengths = [1 + valid + MASKED for valid in VALID]
    return SampleColumns.create(
        input_ids=np.arange(sum(lengths)),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets_of([valid + MASKED for valid in VALID]),
        loss_weight=np.concatenate([[1] * valid + [0] * MASKED for valid in VALID]).astype(np.uint8),
        group_ids=None if group_ids is None else np.array(group_ids),
    )


def weights_by_sequence(
    reducer: Reducer, ranks: list[list[list[int]]], group_ids: list[int] | None = None, max_sequence_length: int | None = None
) -> list[float]:
    """The weight of the valid tokens of each sequence (of the empty one: 0), with rank -> micro-batch -> sequences planned as given."""
    mini_batch = MiniBatchPlan(
        tuple(tuple(one_sample_per_row(np.array(samples, dtype=np.int64), 16, 16) for samples in rank) for rank in ranks)
    )
    structure = batch_structure(columns_of(group_ids), mini_batch, max_sequence_length)
    weights = token_weights(part_of(reducer, "the reducer", "reducer"), structure)
    weight_of_sample = {}
    for k, sample in enumerate(structure.sample_ids.tolist()):
        own = weights[structure.action_offsets[k] : structure.action_offsets[k + 1]].tolist()
        valid, masked = own[: VALID[sample]], own[VALID[sample] :]
        assert masked == [0.0] * MASKED
        assert len(set(valid)) <= 1, "tokens of one sequence weigh alike"
        weight_of_sample[sample] = valid[0] if valid else 0.0
    return [weight_of_sample[sample] for sample in range(len(VALID))]


PAIRS = [[[0, 1], [2, 3]]]
"""One rank, two micro-batches: {8, 3} and {1, 0}."""
EMPTY_ALONE = [[[0, 1, 2], [3]]]
"""One rank, two micro-batches: {8, 3, 1} and {0}."""


@pytest.mark.parametrize("empty", ["count", "skip"])
def test_sum_and_token_mean(empty: str) -> None:
    assert weights_by_sequence(sum_reducer.skyrl_engine_make_reducer(None), PAIRS) == [1, 1, 1, 0]
    assert weights_by_sequence(token_mean.skyrl_engine_make_reducer(MeanConfig(empty)), PAIRS) == [1 / 12, 1 / 12, 1 / 12, 0]


@pytest.mark.parametrize(
    ("empty", "ranks", "expected"),
    [
        ("count", PAIRS, [1 / 22, 1 / 22, 1 / 2, 0]),
        ("skip", PAIRS, [1 / 22, 1 / 22, 1 / 2, 0]),
        ("count", EMPTY_ALONE, [1 / 24, 1 / 24, 1 / 24, 0]),
        ("skip", EMPTY_ALONE, [1 / 12, 1 / 12, 1 / 12, 0]),
        # a micro-batch for each: K = 4 counted, 3 skipped
        ("count", [[[0], [1], [2], [3]]], [1 / 32, 1 / 12, 1 / 4, 0]),
        ("skip", [[[0], [1], [2], [3]]], [1 / 24, 1 / 9, 1 / 3, 0]),
        # two ranks hold what one rank held: K is over all of them
        ("count", [[[0, 1]], [[2, 3]]], [1 / 22, 1 / 22, 1 / 2, 0]),
        # the remainder of a batch counts like any other micro-batch: {8, 3}, {1} and {0}, K = 3
        ("count", [[[0, 1], [2]], [[3], []]], [1 / 33, 1 / 33, 1 / 3, 0]),
        # empty rows that only fill up ranks are no micro-batch: first, in the middle and last
        ("count", [[[], [0, 1]], [[2, 3], []]], [1 / 22, 1 / 22, 1 / 2, 0]),
        ("skip", [[[], [0, 1]], [[], []], [[2, 3], []]], [1 / 22, 1 / 22, 1 / 2, 0]),
    ],
)
def test_token_mean_legacy(empty: str, ranks: list[list[list[int]]], expected: list[float]) -> None:
    assert weights_by_sequence(token_mean_legacy.skyrl_engine_make_reducer(MeanConfig(empty)), ranks) == expected


@pytest.mark.parametrize(("empty", "count"), [("count", 4), ("skip", 3)])
def test_sequence_mean(empty: str, count: int) -> None:
    reducer = sequence_mean.skyrl_engine_make_reducer(MeanConfig(empty))
    assert weights_by_sequence(reducer, PAIRS) == [1 / (count * 8), 1 / (count * 3), 1 / (count * 1), 0]


@pytest.mark.parametrize(("empty", "weight"), [("count", 1 / 40), ("skip", 1 / 30)])
def test_sequence_mean_token_sum_norm(empty: str, weight: float) -> None:
    reducer = sequence_mean_token_sum_norm.skyrl_engine_make_reducer(TokenSumNormConfig(empty))
    assert weights_by_sequence(reducer, PAIRS, max_sequence_length=10) == [weight] * 3 + [0]


@pytest.mark.parametrize(
    ("empty", "groups", "expected"),
    [
        ("count", [7, 7, 5, 5], [1 / 22, 1 / 22, 1 / 2, 0]),
        ("skip", [7, 7, 5, 5], [1 / 22, 1 / 22, 1 / 2, 0]),
        ("count", [7, 7, 7, 5], [1 / 24, 1 / 24, 1 / 24, 0]),
        ("skip", [7, 7, 7, 5], [1 / 12, 1 / 12, 1 / 12, 0]),
    ],
)
def test_group_mean(empty: str, groups: list[int], expected: list[float]) -> None:
    reducer = group_mean.skyrl_engine_make_reducer(MeanConfig(empty))
    for ranks in (PAIRS, EMPTY_ALONE, [[[3], [1]], [[0], [2]]]):
        assert weights_by_sequence(reducer, ranks, group_ids=groups) == expected


def test_a_filler_gives_no_number_to_any_sequence() -> None:
    """`token_mean_legacy` counts the numbers that occur. A filler's number does not."""
    fillers = MiniBatchPlan(
        tuple(
            tuple(one_sample_per_row(np.array(samples, dtype=np.int64), 16, 16) for samples in rank)
            for rank in [[[], [0, 1]], [[2, 3], []]]
        )
    )
    assert batch_structure(columns_of(None), fillers, None).micro_batch.tolist() == [1, 1, 2, 2]
