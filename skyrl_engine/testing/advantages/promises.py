"""Promises of every estimator of advantages, as far as its claims go."""

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.advantage import as_advantage_output
from skyrl_engine.errors import EngineError
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.testing.advantages import batches
from skyrl_engine.testing.advantages.answers import (
    TOLERANCE,
    answers,
    collect_scored,
    draw_rows,
    estimate_or_undecidable,
    list_crowd,
    list_explicit,
    list_explicit_and_large,
    output_of,
    require_same,
    require_same_answers,
    undecidable_unless_repeatable,
)
from skyrl_engine.testing.advantages.batches import DrawnRows
from skyrl_engine.testing.advantages.claim_promises import (
    equal_rewards,
    groups_apart,
    monotone,
    rewards_anywhere,
    scale,
    shift,
    trajectories_apart,
    turns,
    zero_sum,
)
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.process_promises import process_promises
from skyrl_engine.testing.promise import Broken, Inapplicable, Promise, Undecidable, promise
from skyrl_engine.testing.random_state import global_random_state, restore_random_state, seed_everything
from skyrl_engine.testing.subject import Subject


@promise(
    "It returns finite numbers [A], 0 where a token is not scored, also for a group of one, an empty response and rewards of a million",
    cases=draw_rows,
    first=list_explicit_and_large,
)
def finite_values(subject: Subject[Any], case: DrawnRows) -> None:
    try:
        output_of(subject, case.batch())
    except EngineError as error:
        raise Broken(error.cause, error.remedy) from error


def _has_no_oracle(subject: Subject[Any]) -> str | None:
    return None if "oracle" in subject.hooks else "there is no oracle to compare with"


@promise("Its advantages are those of the oracle", cases=draw_rows, exempt=_has_no_oracle, first=list_explicit)
def oracle(subject: Subject[Any], case: DrawnRows) -> None:
    expected = case.collect_scored(np.asarray(subject.hooks["oracle"](case.batch()), dtype=np.float64))
    require_same(
        expected, estimate_or_undecidable(subject, case), "from what the oracle gives", "formula and code differ", "Compare the two"
    )


@promise("Columns that it does not name among its needs change nothing", cases=draw_rows)
@undecidable_unless_repeatable
def needs(subject: Subject[Any], case: DrawnRows) -> None:
    batch = case.batch()
    others = {name: np.linspace(-1, 1, len(batch.rewards), dtype=np.float32) for name in _COLUMNS if name not in case.needs}
    before = answers(subject, case)
    try:
        output = output_of(subject, evolve(batch, columns={**batch.columns, **others}))
    except EngineError as error:
        raise Undecidable(error.cause) from error
    require_same_answers(
        before, collect_scored(case, output), "with other columns", "it reads what it does not declare", "Name it in needs"
    )


_COLUMNS = ("old_values", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs")


def _draw_reordered(subject: Subject[Any]) -> "st.SearchStrategy[tuple[DrawnRows, DrawnRows]]":
    def reorder(rows: DrawnRows) -> "st.SearchStrategy[tuple[DrawnRows, DrawnRows]]":
        return st.permutations(rows.samples).map(lambda order: (rows, evolve(rows, samples=tuple(order))))

    return draw_rows(subject).flatmap(reorder)


def _reverse(subject: Subject[Any]) -> list[tuple[DrawnRows, DrawnRows]]:
    return [(rows, evolve(rows, samples=rows.samples[::-1])) for rows in list_explicit(subject)]


@promise("The order of the samples changes nothing", cases=_draw_reordered, first=_reverse)
@undecidable_unless_repeatable
def sample_order(subject: Subject[Any], case: tuple[DrawnRows, DrawnRows]) -> None:
    one, other = case
    require_same_answers(
        answers(subject, one),
        answers(subject, other),
        "in another order of samples",
        "it takes neighbours for members of one group, or for turns of one trajectory",
        "Use batch.group_of_trajectory, batch.trajectory_index and batch.walk()",
    )


@promise("The ids of groups and trajectories change nothing", cases=draw_rows, first=list_explicit)
@undecidable_unless_repeatable
def labels(subject: Subject[Any], case: DrawnRows) -> None:
    other = batches.relabel(case)
    before = answers(subject, case)
    try:
        after = collect_scored(other, output_of(subject, other.batch()))
    except EngineError as error:
        raise Broken(f"fails where ids are other numbers: {error.cause}", "Take no id for a place") from error
    require_same_answers(
        before,
        after,
        "under other ids",
        "it takes an id for a place, or which id is smaller for a fact",
        "Use batch.group_of_trajectory, and let no id decide who is first or which of two equals is better",
    )


@promise(
    "A loss weight decides whether a token is scored, and is no factor of its advantage",
    cases=lambda s: draw_rows(s, empty=False, failures=False),
    first=list_crowd,
)
@undecidable_unless_repeatable
def loss_weights(subject: Subject[Any], case: DrawnRows) -> None:
    """Weighted means are an estimator's own business; a factor that goes through as it is counts twice."""
    key = case.samples[0].key
    before = _of_trajectory(key, estimate_or_undecidable(subject, case))
    if not before.any():
        raise Inapplicable("the trajectory has no advantage to scale")
    factors = 0.5, 0.25
    after = [_of_trajectory(key, estimate_or_undecidable(subject, batches.scale_weights(case, key, factor))) for factor in factors]
    if all(np.allclose(scaled, factor * before, rtol=TOLERANCE, atol=0) for factor, scaled in zip(factors, after, strict=True)):
        raise Broken(
            f"gives trajectory {key} half of its advantages where its loss weights are halved: they count twice, since the objective "
            "multiplies by them too",
            "Take batch.scored for a mask, and leave batch.loss_weight to the objective",
            factor=0.5,
        )


def _of_trajectory(key: int, values: dict[tuple[int, int], float]) -> npt.NDArray[np.float64]:
    return np.array([value for (trajectory, _), value in values.items() if trajectory == key])


@promise("Observed tokens, wherever they stand, change nothing", cases=draw_rows, first=list_explicit)
@undecidable_unless_repeatable
def observations(subject: Subject[Any], case: DrawnRows) -> None:
    require_same_answers(
        answers(subject, case),
        answers(subject, batches.with_observations(case, 5.0)),
        "with observed tokens in between",
        "it counts tokens that the model did not sample, or padding",
        "Use batch.scored and batch.walk()",
    )


@promise(
    "A failed trajectory changes nobody else's advantage",
    cases=lambda s: draw_rows(s, failures=False, least_group=2),
    first=list_crowd,
)
@undecidable_unless_repeatable
def failures(subject: Subject[Any], case: DrawnRows) -> None:
    failed_key = case.samples[0].key
    failed = tuple(evolve(sample, finished=sample.key != failed_key) for sample in case.samples)
    present = evolve(case, samples=failed)
    if all(sample.key == failed_key for sample in case.samples):
        raise Inapplicable("there is one trajectory alone")
    absent = evolve(case, samples=tuple(sample for sample in case.samples if sample.key != failed_key))
    require_same_answers(
        answers(subject, absent),
        answers(subject, present),
        "next to a trajectory that failed",
        "the failed trajectory is in a mean, or among the counted",
        "Leave out trajectories that are not in batch.finished_trajectories",
    )


@promise("It does not change the batch", cases=draw_rows)
def inputs_unchanged(subject: Subject[Any], case: DrawnRows) -> None:
    batch, names = case.batch(), ("rewards", "loss_weight", "action_offsets", "group_ids", "trajectory_ids", "turn", "finished")
    before = {name: _copy(getattr(batch, name)) for name in names}
    columns = {name: _copy(column) for name, column in batch.columns.items()}
    try:
        output_of(subject, batch)
    except EngineError as error:
        raise Undecidable(error.cause) from error
    changed = [name for name, array in before.items() if not np.array_equal(array, getattr(batch, name))]
    changed += [f"columns[{name!r}]" for name, array in columns.items() if not np.array_equal(array, batch.columns[name])]
    if changed:
        raise Broken(f"changes batch.{changed[0]} in place, which the engine reads afterwards", "Work on a copy: x - y, not x -= y")


def _copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.copy()


@promise(
    "It gives the same bytes for the same batch, in every call and whatever the random state", cases=draw_rows, first=list_crowd
)
def repeatable(subject: Subject[Any], case: DrawnRows) -> None:
    product, outputs = subject.make(), []
    with restore_random_state():
        for seed in range(12):
            seed_everything(seed)
            before, batch = global_random_state(), case.batch()
            try:
                with blame(Owner.of_unrecorded(subject.label, "advantage"), "__call__"):
                    result = product(batch)
                output = as_advantage_output(subject.label, result, batch, returns=product.claims.returns)
                outputs.append([each.tobytes() for each in (output.advantages, output.returns) if each is not None])
            except EngineError as error:
                raise Undecidable(error.cause) from error
            if global_random_state() != before:
                raise Broken("draws from the global random state", "Let advantages be a function of the batch alone")
    if any(each != outputs[0] for each in outputs):
        raise Broken(
            "gives other numbers from one call to the next: it keeps something, or draws numbers",
            "Let advantages be a function of the batch alone",
        )


def _answer(subject: Subject[Any], case: DrawnRows) -> bytes:
    try:
        return output_of(subject, case.batch()).advantages.tobytes()
    except EngineError as error:
        raise Undecidable(error.cause) from error


_process_settings, _another_rank, _another_process = process_promises(_answer, draw_rows, list_crowd)


ADVANTAGE_PROMISES: tuple[Promise[Any, Any], ...] = (
    _process_settings,  # first: once set they are set
    repeatable,  # soon: what wears off after some calls is seen while it lasts
    _another_rank,
    finite_values,
    oracle,
    needs,
    sample_order,
    labels,
    loss_weights,
    groups_apart,
    trajectories_apart,
    turns,
    rewards_anywhere,
    observations,
    failures,
    shift,
    scale,
    equal_rewards,
    zero_sum,
    monotone,
    inputs_unchanged,
    _another_process,  # late: it takes seconds to start
    *PLUGIN_PROMISES,
)
