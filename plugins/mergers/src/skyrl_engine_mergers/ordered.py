"""Merge the outputs of ranks into one: every planned sample exactly once, in the caller's order, without Python code per sample."""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from skyrl_engine import OutputError
from skyrl_engine.contracts import PADDING_SAMPLE, BatchOutput, BatchPlan, IntArray, RankOutput

LISTED = 10
"""Number of ids of a kind that an error lists."""

DENSE = 8
"""Ids in a range of fewer than this many times their number are looked up in a table; others are sorted, which takes five times as long."""


class OrderedMerger:
    """Keeps the outputs of collection ranks, drops padding samples and orders by the plan; combines metrics in data-parallel order."""

    def merge(self, outputs: Sequence[RankOutput], plan: BatchPlan) -> BatchOutput:
        """Return one output of all mini-batches in `plan`, in its sample order.

        The arrays of a single collection rank that are in order already are not copied. Metrics of other ranks than collection ranks are
        ignored, because they repeat those of their collection rank. Raises OutputError for samples that are missing, duplicated or
        unexpected, and for ranks that return different fields.
        """
        collected = sorted((output for output in outputs if output.coords.collects), key=lambda output: output.coords.dp)
        expected = plan.expected_ids
        _refuse_different_fields(collected)
        ids = np.concatenate([expected[:0], *(output.sample_ids for output in collected)])
        in_order = np.array_equal(ids, expected)
        if in_order and len(collected) == 1:
            (whole,) = collected
        else:
            whole = RankOutput.concat(collected, order=None if in_order else _places_in_order(ids, expected, collected, plan))
        return BatchOutput(whole.sample_ids, whole.action_lengths, whole.scored, whole.fields, whole.metrics)


def _places_in_order(ids: IntArray, expected: IntArray, collected: Sequence[RankOutput], plan: BatchPlan) -> IntArray:
    """Return int64[len(expected)], the place of each expected id in `ids`, which may hold padding. Raises OutputError unless they match."""
    real = np.flatnonzero(ids != PADDING_SAMPLE)
    if len(real) != len(expected):
        _refuse(ids[real], expected, collected, plan)
    places = real[_positions(ids[real], expected)]
    # expected ids are unique and there are equally many: if each is found, none can be duplicated or unexpected
    if not np.array_equal(ids[places], expected):
        _refuse(ids[real], expected, collected, plan)
    return places


def _positions(ids: IntArray, expected: IntArray) -> IntArray:
    """Return int64[len(expected)], the place of each expected id in equally many `ids`; any place for an id that is not there."""
    if not len(ids):
        return ids
    low, high = int(ids.min()), int(ids.max())
    if high - low < DENSE * len(ids):
        table = np.zeros(high - low + 1, dtype=np.int64)
        table[ids - low] = np.arange(len(ids))
        entries: IntArray = expected.clip(low, high) - low
        return table[entries]
    order: IntArray = np.argsort(ids)
    positions: IntArray = np.searchsorted(ids[order], expected).clip(max=len(ids) - 1)
    return order[positions]


def _refuse(ids: IntArray, expected: IntArray, collected: Sequence[RankOutput], plan: BatchPlan) -> NoReturn:
    values, counts = np.unique(ids, return_counts=True)
    missing = np.setdiff1d(expected, values)
    repeated = values[(counts > 1) & np.isin(values, expected)]
    unexpected = np.setdiff1d(values, expected)
    details = [
        *_lines("missing", "planned on data-parallel rank", missing, _find_planned_ranks(missing, plan)),
        *_lines("duplicated", "returned by rank", repeated, _returning_ranks(repeated, collected)),
        *_lines("unexpected", "returned by rank", unexpected, _returning_ranks(unexpected, collected)),
    ]
    raise OutputError(
        f"the outputs of {len(collected)} ranks do not form the batch of {len(expected)} samples: "
        f"{len(missing)} missing, {len(repeated)} duplicated, {len(unexpected)} unexpected",
        remedy="Check that the backend returns each of its rank's samples exactly once, under the id it was given",
        details=details,
    )


def _lines(label: str, relation: str, ids: IntArray, ranks: Sequence[Sequence[int]]) -> list[str]:
    lines = [
        f"{label}: sample {sample_id}, {relation} {', '.join(map(str, places))}"
        for sample_id, places in zip(ids[:LISTED].tolist(), ranks, strict=True)
    ]
    return lines + [f"{label}: and {len(ids) - LISTED} more"] * (len(ids) > LISTED)


def _find_planned_ranks(ids: IntArray, plan: BatchPlan) -> list[list[int]]:
    """Return, for each of the first few ids, the data-parallel ranks that the plan gave it to."""
    parts = [(dp, mini.rank_samples(dp)) for mini in plan.mini_batches for dp in range(len(mini.ranks))]
    return [[dp for dp, samples in parts if (plan.sample_ids[samples] == wanted).any()] for wanted in ids[:LISTED]]


def _returning_ranks(ids: IntArray, collected: Sequence[RankOutput]) -> list[list[int]]:
    """Return, for each of the first few ids, the world ranks whose outputs hold it, repeated if an output holds it repeatedly."""
    return [
        [output.coords.rank for output in collected for _ in range(np.count_nonzero(output.sample_ids == wanted))]
        for wanted in ids[:LISTED]
    ]


def _refuse_different_fields(collected: Sequence[RankOutput]) -> None:
    filled = [output for output in collected if len(output.sample_ids)]
    for output in filled[1:]:
        if output.fields.keys() != filled[0].fields.keys():
            raise OutputError(
                f"rank {output.coords.rank} returned the fields {sorted(output.fields)} and rank {filled[0].coords.rank} "
                f"{sorted(filled[0].fields)}",
                remedy="Let every rank return the same per-token outputs",
            )
