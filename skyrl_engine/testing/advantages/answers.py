"""Answers of estimators to drawn and explicit rows, and what says that two of them are the same."""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import numpy as np
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.advantage import AdvantageBatch, AdvantageOutput, as_advantage_output
from skyrl_engine.errors import EngineError
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.testing.advantages import batches
from skyrl_engine.testing.advantages.batches import DrawnRows
from skyrl_engine.testing.promise import Broken, Undecidable
from skyrl_engine.testing.subject import Subject

TOLERANCE = 2e-5
"""Relative and absolute: advantages are float32, and sums in another order differ by less."""


def draw_rows(subject: Subject[Any], **options: Any) -> "st.SearchStrategy[DrawnRows]":
    return batches.rows(subject.make().needs, **options)


def list_crowd(subject: Subject[Any]) -> list[DrawnRows]:
    return [batches.make_crowd(subject.make().needs)]


def list_explicit(subject: Subject[Any]) -> list[DrawnRows]:
    return [*list_crowd(subject), batches.make_long_and_failed(subject.make().needs)]


def list_explicit_and_large(subject: Subject[Any]) -> list[DrawnRows]:
    needs = subject.make().needs
    return [*list_explicit(subject), batches.make_large(needs), batches.make_batch_of_failures(needs)]


def output_of(subject: Subject[Any], batch: AdvantageBatch) -> AdvantageOutput:
    """Return the output as the engine takes it. Raises the error that a run would show."""
    product = subject.make()
    with blame(Owner.of_unrecorded(subject.label, "advantage"), "__call__"):
        result = product(batch)
    return as_advantage_output(subject.label, result, batch, returns=product.claims.returns)


def estimate_or_undecidable(subject: Subject[Any], rows: DrawnRows) -> dict[tuple[int, int], float]:
    """Return advantages of scored tokens. Raises Undecidable for an estimator that fails or returns something else."""
    try:
        return rows.collect_scored(output_of(subject, rows.batch()).advantages)
    except EngineError as error:
        raise Undecidable(error.cause) from error


Scored = dict[tuple[int, int], float]
"""The numbers of scored tokens, by trajectory and place among its scored tokens."""


def collect_scored(rows: DrawnRows, output: AdvantageOutput) -> dict[str, Scored]:
    """Return advantages and, where there are any, returns of scored tokens, by the noun for one of them."""
    returns = {} if output.returns is None else {"return": rows.collect_scored(output.returns)}
    return {"advantage": rows.collect_scored(output.advantages), **returns}


def answers(subject: Subject[Any], rows: DrawnRows) -> dict[str, Scored]:
    """Return advantages and returns. Raises Undecidable where the estimator fails or returns something else."""
    try:
        return collect_scored(rows, output_of(subject, rows.batch()))
    except EngineError as error:
        raise Undecidable(error.cause) from error


def undecidable_unless_repeatable(check: Callable[[Subject[Any], Any], None]) -> Callable[[Subject[Any], Any], None]:
    """Make a difference undecidable where the same batch gives other numbers from call to call, which `repeatable` reports."""

    @wraps(check)
    def compare(subject: Subject[Any], case: Any) -> None:
        try:
            check(subject, case)
        except Broken:
            rows = case[0] if isinstance(case, tuple) else case
            if answers(subject, rows) != answers(subject, rows):
                raise Undecidable("the same batch has other advantages from call to call") from None
            raise

    return compare


def require_same_answers(
    before: dict[str, Scored], after: dict[str, Scored], when: str, cause: str, remedy: str, *, of: Collection[int] | None = None
) -> None:
    """Compare advantages and returns; of these trajectories alone, unless `of` is None."""
    for noun, values in before.items():
        compared = {token: value for token, value in values.items() if of is None or token[0] in of}
        require_same(compared, after[noun], when, cause, remedy, noun=noun)


def require_same(before: Scored, after: Scored, when: str, cause: str, remedy: str, *, noun: str = "advantage") -> None:
    for (trajectory, place), value in before.items():
        if not np.isclose(value, after[trajectory, place], rtol=TOLERANCE, atol=TOLERANCE):
            raise Broken(
                f"the {noun} of scored token {place} of trajectory {trajectory} changes from {value:.6g} to "
                f"{after[trajectory, place]:.6g} {when}: {cause}",
                remedy,
            )


def collect_first_values(values: dict[tuple[int, int], float]) -> dict[int, float]:
    """Return the value of each trajectory's first scored token."""
    return {trajectory: value for (trajectory, place), value in values.items() if place == 0}
