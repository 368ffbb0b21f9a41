"""Explicit cases of collators: batches that hardly any draw holds, with more samples, longer ones, and ranks that have nothing to do."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.collators.cases import CutCase, Planning
from skyrl_engine.testing.collators.strategies import COLUMN_NAMES, SampleLists
from skyrl_engine.testing.subject import Subject

WIDE = 65
"""Numbers per token, more than a word of 64 bits counts."""


def list_explicit_cuts(subject: Subject[Any]) -> Iterable[CutCase]:
    """Return batches with layouts that cut by rows and by tokens; a collator that refuses one of both decides the other.

    Of a subject with layouts of its own, those cases that it plans.
    """
    cases: Iterable[CutCase] = _list_cases()
    if subject.make().rows == "tree":
        cases = [*(evolve(case, trees=True) for case in cases), *_list_trees()]
    return [case for case in cases if "layouts" not in subject.hooks or _can_plan(subject, case)]


def _can_plan(subject: Subject[Any], case: CutCase) -> bool:
    try:
        subject.make().plan(case.planning.lengths, case.layout)
    except EngineError:
        return False
    return True


def _list_cases() -> Iterator[CutCase]:
    # groups of six, so that no mini-batch of twenty ends with one by itself
    many = _make_samples(40, longest=12, group=6, unit=2)
    cut: dict[str, int]
    for cut in ({"micro_batch_rows": 6}, {"micro_batch_tokens": 6 * 32}):
        yield CutCase(many, Layout(dp=3, mini_batch_size=20, **cut))
        # a budget may count true lengths, which alignment to tensor-parallel ranks exceeds
        yield CutCase(many, Layout(dp=2, tp=1 if "micro_batch_tokens" in cut else 2, **cut))
    long = _make_samples(6, longest=300)
    longest = int(long.lengths.tokens.max())
    for cut in ({"micro_batch_rows": 2}, {"micro_batch_tokens": 2 * longest}):
        yield CutCase(long, Layout(dp=2, **cut))
    # five samples that share no row or micro-batch: the second rank fills up with empty micro-batches next to its own
    few = _make_samples(5, longest=9, shortest=9)
    for cut in ({"micro_batch_rows": 1}, {"micro_batch_tokens": int(few.lengths.tokens.max())}):
        yield CutCase(few, Layout(dp=2, **cut))
        yield CutCase(few.take([0]), Layout(dp=4, **cut))


def _list_trees() -> Iterator[CutCase]:
    """Groups of six that share prompts, some of whose answers go on alike, two of them to the end; whole, and cut by tokens and ranks."""
    columns = _make_samples(40, longest=12, shortest=8, group=6, unit=2)
    ids, offsets = columns.input_ids.copy(), columns.token_offsets.tolist()
    for sample, (begin, end) in enumerate(pairwise(offsets)):
        first = offsets[sample - sample % 6]
        # the fifth of a group is as long as its first, or a part of it
        count = min(8 + sample % 3 if sample % 6 < 5 else 40, end - begin, offsets[sample - sample % 6 + 1] - first)
        ids[begin : begin + count] = ids[first : first + count]
    shared = evolve(columns, input_ids=ids)
    for cut in ({}, {"micro_batch_tokens": 150}, {"micro_batch_tokens": 60}):
        yield CutCase(shared, Layout(**cut), trees=True)
        yield CutCase(shared, Layout(dp=3, tp=2, mini_batch_size=20, **cut), trees=True)
    yield CutCase(_make_samples(68, longest=9, shortest=3, group=68), Layout(dp=2), trees=True)


def list_explicit_and_wide(subject: Subject[Any]) -> Iterable[CutCase]:
    """Return these batches, and one with columns of `WIDE` numbers per token where the collator lays such columns over rows, as it may."""
    wide = CutCase(_make_samples(5, longest=9, wide=True), Layout(), subject.make().rows == "tree")
    return [*list_explicit_cuts(subject), *([wide] if _can_build(subject, wide) else [])]


def _can_build(subject: Subject[Any], case: CutCase) -> bool:
    collator = subject.make()
    try:
        for micro_batch in collator.plan(case.planning.lengths, case.layout).micro_batches:
            collator.build(case.columns, micro_batch)
    except Exception:  # noqa: BLE001 - in whatever way it says that it does not
        return False
    return True


def list_explicit_plannings(subject: Subject[Any]) -> Iterable[Planning]:
    """Return the lengths of these batches with their layouts."""
    return [case.planning for case in list_explicit_cuts(subject)]


def _make_samples(
    count: int, *, longest: int, shortest: int = 1, group: int = 1, unit: int = 1, wide: bool = False
) -> SampleColumns:
    """Make samples whose prompts and responses have up to `longest` tokens each, with fractional weights and every column.

    `wide` adds columns of `WIDE` numbers per token.
    """
    numbers = np.random.default_rng(count)
    # the first sample is as long as any may be
    lengths = [np.array([longest, *numbers.integers(shortest, longest, count - 1, endpoint=True)]) for _ in range(2)]
    prompts, responses = ([numbers.integers(0, 300, length).tolist() for length in part_lengths] for part_lengths in lengths)
    values = [[numbers.normal(size=len(response)).astype(np.float32).tolist() for response in responses] for _ in range(5)]
    columns: dict[str, Any] = dict(zip(COLUMN_NAMES, values[1:], strict=True))
    if wide:
        columns["top_ids"] = [numbers.integers(0, 300, (len(response), WIDE)).tolist() for response in responses]
        columns["top_logprobs"] = [(-numbers.random((len(response), WIDE))).tolist() for response in responses]
    lists = SampleLists(
        prompts=prompts,
        responses=responses,
        loss_masks=values[0],
        columns=columns,
        sample_ids=(2**33 - 3 * np.arange(count)).tolist(),
        # falling, so that who sorts them changes something
        group_ids=(count - np.arange(count) // group).tolist(),
        unit_ids=(np.arange(count) // unit).tolist(),
    )
    return lists.to_columns()
