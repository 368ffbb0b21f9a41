"""Explicit cases of collators: batches that hardly any draw holds, with more samples, longer ones, and ranks that have nothing to do."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.collators.cases import CutCase, Planning
from skyrl_engine.testing.collators.strategies import COLUMN_NAMES, SampleLists
from skyrl_engine.testing.subject import Subject


def explicit_cuts(subject: Subject[Any]) -> Iterable[CutCase]:
    """Return batches with layouts that cut by rows and by tokens; a collator that refuses one of both decides the other.

    Of a subject with layouts of its own, those cases that it plans.
    """
    return [case for case in _cases() if "layouts" not in subject.hooks or _planned(subject, case)]


def _planned(subject: Subject[Any], case: CutCase) -> bool:
    try:
        subject.make().plan(case.columns.lengths, case.layout)
    except EngineError:
        return False
    return True


def _cases() -> Iterator[CutCase]:
    many = _samples(40, longest=12, group=4, unit=2)
    cut: dict[str, int]
    for cut in ({"micro_batch_rows": 6}, {"micro_batch_tokens": 6 * 32}):
        yield CutCase(many, Layout(dp=3, mini_batch_size=20, **cut))
        # a budget may count true lengths, which alignment to tensor-parallel ranks exceeds
        yield CutCase(many, Layout(dp=2, tp=1 if "micro_batch_tokens" in cut else 2, **cut))
    long = _samples(6, longest=300)
    longest = int(long.lengths.tokens.max())
    for cut in ({"micro_batch_rows": 2}, {"micro_batch_tokens": 2 * longest}):
        yield CutCase(long, Layout(dp=2, **cut))
    # five samples that share no row or micro-batch: the second rank fills up beside micro-batches of its own
    few = _samples(5, longest=9, shortest=9)
    for cut in ({"micro_batch_rows": 1}, {"micro_batch_tokens": int(few.lengths.tokens.max())}):
        yield CutCase(few, Layout(dp=2, **cut))
        yield CutCase(few.take([0]), Layout(dp=4, **cut))


def explicit_plannings(subject: Subject[Any]) -> Iterable[Planning]:
    """Return the lengths of these batches with their layouts."""
    return [case.planning for case in explicit_cuts(subject)]


def _samples(count: int, *, longest: int, shortest: int = 1, group: int = 1, unit: int = 1) -> SampleColumns:
    """Make samples whose prompts and responses have up to `longest` tokens each, with fractional weights and every column."""
    numbers = np.random.default_rng(count)
    prompts, responses = (
        [numbers.integers(0, 300, length).tolist() for length in numbers.integers(shortest, longest, count, endpoint=True)]
        for _ in range(2)
    )
    values = [[numbers.normal(size=len(response)).astype(np.float32).tolist() for response in responses] for _ in range(5)]
    lists = SampleLists(
        prompts=prompts,
        responses=responses,
        loss_masks=values[0],
        columns=dict(zip(COLUMN_NAMES, values[1:], strict=True)),
        sample_ids=(2**33 - 3 * np.arange(count)).tolist(),
        group_ids=(np.arange(count) // group).tolist(),
        unit_ids=(np.arange(count) // unit).tolist(),
    )
    return lists.to_columns()
