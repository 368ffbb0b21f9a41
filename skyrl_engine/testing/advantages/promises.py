"""Promises of every estimator of advantages, as far as its claims go."""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.advantage import AdvantageBatch, AdvantageOutput, as_advantage_output
from skyrl_engine.errors import EngineError
from skyrl_engine.registry.host import Owner, blaming
from skyrl_engine.testing.advantages import batches
from skyrl_engine.testing.advantages.batches import DrawnRows
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.process_promises import process_promises
from skyrl_engine.testing.promise import Broken, Inapplicable, Promise, Undecidable, promise
from skyrl_engine.testing.random_state import global_random_state, restored_random_state, seed_everything
from skyrl_engine.testing.subject import Subject

TOLERANCE = 2e-5
"""Relative and absolute: advantages are float32, and sums in another order differ by less."""

FAR = 2.0**20
"""Added to a reward of `REWARDS`, it is exact in float32; a variance of it by squares is not, in float64 either."""


def _drawn(subject: Subject[Any], **options: Any) -> "st.SearchStrategy[DrawnRows]":
    return batches.rows(subject.make().needs, **options)


def _crowd(subject: Subject[Any]) -> list[DrawnRows]:
    return [batches.crowd(subject.make().needs)]


def _explicit(subject: Subject[Any]) -> list[DrawnRows]:
    return [*_crowd(subject), batches.long_and_failed(subject.make().needs)]


def _explicit_and_large(subject: Subject[Any]) -> list[DrawnRows]:
    return [*_explicit(subject), batches.large(subject.make().needs)]


def _made(subject: Subject[Any], batch: AdvantageBatch) -> AdvantageOutput:
    """Return the output as the engine takes it. Raises the error that a run would show."""
    product = subject.make()
    with blaming(Owner.named(subject.label, "advantage"), "__call__"):
        result = product(batch)
    return as_advantage_output(subject.label, result, batch, returns=product.claims.returns)


def _decided(subject: Subject[Any], rows: DrawnRows) -> dict[tuple[int, int], float]:
    """Return advantages of scored tokens. Raises Undecidable for an estimator that fails or returns something else."""
    try:
        return rows.scored(_made(subject, rows.batch()).advantages)
    except EngineError as error:
        raise Undecidable(error.cause) from error


Scored = dict[tuple[int, int], float]
"""The numbers of scored tokens, by trajectory and place among its scored tokens."""


def _scored(rows: DrawnRows, output: AdvantageOutput) -> dict[str, Scored]:
    """Return advantages and, where there are any, returns of scored tokens, by what one of them is called."""
    returns = {} if output.returns is None else {"return": rows.scored(output.returns)}
    return {"advantage": rows.scored(output.advantages), **returns}


def _answers(subject: Subject[Any], rows: DrawnRows) -> dict[str, Scored]:
    """Return advantages and returns. Raises Undecidable as `_decided` does."""
    try:
        return _scored(rows, _made(subject, rows.batch()))
    except EngineError as error:
        raise Undecidable(error.cause) from error


def _compared(check: Callable[[Subject[Any], Any], None]) -> Callable[[Subject[Any], Any], None]:
    """Make a difference undecidable where the same batch gives other numbers from call to call, which `repeatable` tells."""

    @wraps(check)
    def compared(subject: Subject[Any], case: Any) -> None:
        try:
            check(subject, case)
        except Broken:
            rows = case[0] if isinstance(case, tuple) else case
            if _answers(subject, rows) != _answers(subject, rows):
                raise Undecidable("the same batch has other advantages from call to call") from None
            raise

    return compared


def _require_same_answers(
    before: dict[str, Scored], after: dict[str, Scored], when: str, cause: str, remedy: str, *, of: Collection[int] | None = None
) -> None:
    """Compare advantages and returns; of these trajectories alone, unless `of` is None."""
    for noun, values in before.items():
        kept = {token: value for token, value in values.items() if of is None or token[0] in of}
        _require_same(kept, after[noun], when, cause, remedy, noun=noun)


def _require_same(before: Scored, after: Scored, when: str, cause: str, remedy: str, *, noun: str = "advantage") -> None:
    for (trajectory, place), value in before.items():
        if not np.isclose(value, after[trajectory, place], rtol=TOLERANCE, atol=TOLERANCE):
            raise Broken(
                f"the {noun} of scored token {place} of trajectory {trajectory} changes from {value:.6g} to "
                f"{after[trajectory, place]:.6g} {when}: {cause}",
                remedy,
            )


def _worth(values: dict[tuple[int, int], float]) -> dict[int, float]:
    """Return the value of each trajectory's first scored token."""
    return {trajectory: value for (trajectory, place), value in values.items() if place == 0}


# --- what it returns ---------------------------------------------------------------------------------------------------------------


@promise(
    "It returns finite numbers [A], 0 where a token is not scored, also for a group of one, an empty response and rewards of a million",
    cases=_drawn,
    first=_explicit_and_large,
)
def finite_values(subject: Subject[Any], case: DrawnRows) -> None:
    try:
        _made(subject, case.batch())
    except EngineError as error:
        raise Broken(error.cause, error.remedy) from error


def _has_no_oracle(subject: Subject[Any]) -> str | None:
    return None if "oracle" in subject.hooks else "there is no oracle to compare with"


@promise("Its advantages are those of the oracle", cases=_drawn, exempt=_has_no_oracle, first=_explicit)
def oracle(subject: Subject[Any], case: DrawnRows) -> None:
    due = case.scored(np.asarray(subject.hooks["oracle"](case.batch()), dtype=np.float64))
    _require_same(due, _decided(subject, case), "from what the oracle gives", "formula and code differ", "Compare the two")


@promise("Columns that it does not name among its needs change nothing", cases=_drawn)
@_compared
def needs(subject: Subject[Any], case: DrawnRows) -> None:
    batch = case.batch()
    others = {name: np.linspace(-1, 1, len(batch.rewards), dtype=np.float32) for name in _COLUMNS if name not in case.needs}
    before = _answers(subject, case)
    try:
        given = _made(subject, evolve(batch, columns={**batch.columns, **others}))
    except EngineError as error:
        raise Undecidable(error.cause) from error
    _require_same_answers(
        before, _scored(case, given), "with other columns", "it reads what it does not declare", "Name it in needs"
    )


_COLUMNS = ("old_values", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs")

# --- what it may depend on ---------------------------------------------------------------------------------------------------------


def _no_order(subject: Subject[Any]) -> "st.SearchStrategy[tuple[DrawnRows, DrawnRows]]":
    def moved(rows: DrawnRows) -> "st.SearchStrategy[tuple[DrawnRows, DrawnRows]]":
        return st.permutations(rows.samples).map(lambda order: (rows, evolve(rows, samples=tuple(order))))

    return _drawn(subject).flatmap(moved)


def _reversed(subject: Subject[Any]) -> list[tuple[DrawnRows, DrawnRows]]:
    return [(rows, evolve(rows, samples=rows.samples[::-1])) for rows in _explicit(subject)]


@promise("The order of the samples changes nothing", cases=_no_order, first=_reversed)
@_compared
def sample_order(subject: Subject[Any], case: tuple[DrawnRows, DrawnRows]) -> None:
    one, other = case
    _require_same_answers(
        _answers(subject, one),
        _answers(subject, other),
        "in another order of samples",
        "it takes neighbours for members of one group, or for turns of one trajectory",
        "Use batch.group_of_trajectory, batch.trajectory_index and batch.walk()",
    )


@promise("The ids of groups and trajectories change nothing", cases=_drawn, first=_explicit)
@_compared
def labels(subject: Subject[Any], case: DrawnRows) -> None:
    other = batches.relabelled(case)
    before = _answers(subject, case)
    try:
        after = _scored(other, _made(subject, other.batch()))
    except EngineError as error:
        raise Broken(f"fails where ids are other numbers: {error.cause}", "Take no id for a place") from error
    _require_same_answers(
        before,
        after,
        "under other ids",
        "it takes an id for a place, or which id is smaller for a fact",
        "Use batch.group_of_trajectory, and let no id decide who is first or which of two equals is better",
    )


@promise(
    "A loss weight decides whether a token is scored, and is no factor of its advantage",
    cases=lambda s: _drawn(s, empty=False, failures=False),
    first=_crowd,
)
@_compared
def loss_weights(subject: Subject[Any], case: DrawnRows) -> None:
    """Weighted means are an estimator's own business; a factor that goes through as it is counts twice."""
    key = case.samples[0].key
    before = _of_trajectory(key, _decided(subject, case))
    if not before.any():
        raise Inapplicable("the trajectory has no advantage to scale")
    factors = 0.5, 0.25
    after = [_of_trajectory(key, _decided(subject, batches.lighter(case, key, factor))) for factor in factors]
    if all(np.allclose(made, factor * before, rtol=TOLERANCE, atol=0) for factor, made in zip(factors, after, strict=True)):
        raise Broken(
            f"gives trajectory {key} half of its advantages where its loss weights are halved: they count twice, since the objective "
            "multiplies by them too",
            "Take batch.scored for a mask, and leave batch.loss_weight to the objective",
            factor=0.5,
        )


def _of_trajectory(key: int, values: dict[tuple[int, int], float]) -> npt.NDArray[np.float64]:
    return np.array([value for (trajectory, _), value in values.items() if trajectory == key])


def _whole_batch(subject: Subject[Any]) -> str | None:
    return "the estimator claims whole_batch: groups reach each other by nature" if subject.make().claims.whole_batch else None


@promise("The rewards of one group change nothing in another", cases=_drawn, exempt=_whole_batch, first=_explicit)
@_compared
def groups_apart(subject: Subject[Any], case: DrawnRows) -> None:
    group_of = {sample.key: sample.group for sample in case.samples}
    changed = min(group_of.values())
    _require_same_answers(
        _answers(subject, case),
        _answers(subject, case.rewarded(lambda key: 4.0 * (key + 1) if group_of[key] == changed else 0.0)),
        "when rewards of another group change",
        "it counts over the batch",
        "Compare within groups, or claim whole_batch",
        of={key for key, group in group_of.items() if group != changed},
    )


def _groups_needed(subject: Subject[Any]) -> str | None:
    return "the estimator compares trajectories of a group" if subject.make().claims.groups == "needed" else _whole_batch(subject)


@promise(
    "Where it claims to ignore groups, the rewards of one trajectory change nothing in another",
    cases=_drawn,
    exempt=_groups_needed,
    first=_explicit,
)
@_compared
def trajectories_apart(subject: Subject[Any], case: DrawnRows) -> None:
    changed = case.samples[0].key
    before, others = _answers(subject, case), {sample.key for sample in case.samples} - {changed}
    for more, cause, remedy in (
        (
            4.0,
            "it compares trajectories, and claims groups = 'ignored': a run with groups of one is not refused",
            "Claim groups = 'needed', or whole_batch",
        ),
        (
            2.0**30,
            "a sum that runs over trajectories has lost the digits of small rewards",
            "Add up each trajectory alone, in float64",
        ),
    ):
        after = _answers(subject, case.rewarded(lambda key, more=more: more if key == changed else 0.0))  # type: ignore[misc]
        _require_same_answers(before, after, "when rewards of another trajectory change", cause, remedy, of=others)


def _no_outcome(subject: Subject[Any]) -> str | None:
    return None if subject.make().claims.outcome else "the estimator does not claim outcome: tokens have values of their own"


@promise(
    "The number of samples that a trajectory is cut into changes nothing",
    cases=lambda s: _drawn(s, turns=3),
    exempt=_no_outcome,
    first=_explicit,
)
@_compared
def turns(subject: Subject[Any], case: DrawnRows) -> None:
    values = _decided(subject, case)
    for (trajectory, place), value in values.items():
        if not np.isclose(value, first := values[trajectory, 0], rtol=TOLERANCE, atol=TOLERANCE):
            raise Broken(
                f"scored token {place} of trajectory {trajectory} has the advantage {value:.6g}, and its first {first:.6g}: it claims outcome",
                "Give all tokens of a trajectory one value (batch.spread), or do not claim outcome",
            )
    _require_same(
        values,
        _decided(subject, batches.joined_turns(case)),
        "when a trajectory is one sample instead of several",
        "it counts samples, not trajectories",
        "Take rewards from batch.trajectory_rewards(), one per trajectory",
    )


@promise("Observed tokens, wherever they stand, change nothing", cases=_drawn, first=_explicit)
@_compared
def observations(subject: Subject[Any], case: DrawnRows) -> None:
    _require_same_answers(
        _answers(subject, case),
        _answers(subject, batches.with_observations(case, 5.0)),
        "with observed tokens in between",
        "it counts tokens that the model did not sample, or padding",
        "Use batch.scored and batch.walk()",
    )


@promise(
    "A failed trajectory changes nobody else's advantage",
    cases=lambda s: _drawn(s, failures=False, least_group=2),
    first=_crowd,
)
@_compared
def failures(subject: Subject[Any], case: DrawnRows) -> None:
    spoilt = case.samples[0].key
    failed = tuple(evolve(sample, finished=sample.key != spoilt) for sample in case.samples)
    present = evolve(case, samples=failed)
    if all(sample.key == spoilt for sample in case.samples):
        raise Inapplicable("there is one trajectory alone")
    absent = evolve(case, samples=tuple(sample for sample in case.samples if sample.key != spoilt))
    _require_same_answers(
        _answers(subject, absent),
        _answers(subject, present),
        "beside a trajectory that failed",
        "the failed trajectory is in a mean, or among the counted",
        "Leave out trajectories that are not in batch.finished_trajectories",
    )


# --- what it claims ----------------------------------------------------------------------------------------------------------------


def _not_claiming(flag: str) -> Any:
    def exempt(subject: Subject[Any]) -> str | None:
        return None if getattr(subject.make().claims, flag) else f"the estimator does not claim {flag}"

    return exempt


def _no_groups(subject: Subject[Any]) -> str | None:
    return None if subject.make().claims.groups == "needed" else "the estimator does not compare trajectories of a group"


@promise(
    "A constant added to all rewards of the batch changes nothing",
    cases=lambda s: _drawn(s, empty=False),
    exempt=_not_claiming("shift"),
    first=_crowd,
)
@_compared
def shift(subject: Subject[Any], case: DrawnRows) -> None:
    before = _decided(subject, case)
    _require_same(
        before,
        _decided(subject, case.rewarded(lambda _key: 8.0)),
        "when every reward is 8 more",
        "the baseline is not the mean of all that it is subtracted from",
        "Subtract the mean of the finished trajectories' rewards, or do not claim shift",
    )
    _require_same(
        before,
        _decided(subject, case.rewarded(lambda _key: FAR)),
        f"when every reward is {FAR:,.0f} more",
        "what is left of large numbers when they are subtracted has lost its digits",
        "Compute in float64, and take the variance of rewards less their mean, not the mean of their squares less that of the mean",
    )


@promise(
    "Rewards times 3 give advantages times 3, or the same ones, as it claims",
    cases=_drawn,
    exempt=_not_claiming("scale"),
    first=_explicit,
)
@_compared
def scale(subject: Subject[Any], case: DrawnRows) -> None:
    claimed = subject.make().claims.scale
    larger = tuple(
        # no power of 2, by which a rounded number is multiplied without a trace
        evolve(sample, tokens=tuple(evolve(token, reward=3 * token.reward) for token in sample.tokens))
        for sample in case.samples
    )
    before, after = _decided(subject, case), _decided(subject, evolve(case, samples=larger))
    due = {place: value * (3 if claimed == "linear" else 1) for place, value in before.items()}
    _require_same(due, after, "where the claim gives the former", f"it claims scale = {claimed!r}", "Correct it, or the claim")


@promise("Equal rewards give exactly 0, whatever they are", cases=lambda s: batches.equal(s.make().needs), exempt=_no_groups)
def equal_rewards(subject: Subject[Any], case: DrawnRows) -> None:
    for (trajectory, _), value in _decided(subject, case).items():
        if value != 0:
            raise Broken(
                f"gives trajectory {trajectory} the advantage {value:.6g} where all rewards of its group are equal: a rounded mean is not "
                "the reward itself",
                "Give 0 where the largest reward of a group is the smallest",
            )


@promise(
    "The values of a group's trajectories add up to 0",
    cases=lambda s: _drawn(s, even=True),
    exempt=_not_claiming("zero_sum"),
    first=_crowd,
)
@_compared
def zero_sum(subject: Subject[Any], case: DrawnRows) -> None:
    group_of = {sample.key: sample.group for sample in case.samples}
    totals: dict[int, float] = {}
    for trajectory, value in _worth(_decided(subject, case)).items():
        totals[group_of[trajectory]] = totals.get(group_of[trajectory], 0.0) + value
    for group, total in totals.items():
        if abs(total) > TOLERANCE:
            raise Broken(
                f"the values of group {group} add up to {total:.6g}",
                "Subtract the mean of the finished trajectories' rewards, or do not claim zero_sum",
            )


@promise(
    "Inside a group, a higher reward never has a lower advantage",
    cases=lambda s: _drawn(s, even=True),
    exempt=_no_groups,
    first=_crowd,
)
def monotone(subject: Subject[Any], case: DrawnRows) -> None:
    values = _worth(_decided(subject, case))
    finished = {sample.key: sample for sample in case.samples if sample.key in values}
    for one in finished.values():
        for other in finished.values():
            higher = _reward(one) > _reward(other)
            if one.group == other.group and higher and values[one.key] < values[other.key] - TOLERANCE:
                raise Broken(
                    f"the reward {_reward(one):g} has the advantage {values[one.key]:.6g}, and the lower reward {_reward(other):g} of the "
                    f"same group {values[other.key]:.6g}",
                    "Look for a sign, or a division by a number below 0",
                )


def _reward(sample: batches.DrawnSample) -> float:
    return sum(token.reward for token in sample.tokens)


# --- what it leaves alone ----------------------------------------------------------------------------------------------------------


@promise("It does not change the batch", cases=_drawn)
def inputs_unchanged(subject: Subject[Any], case: DrawnRows) -> None:
    batch, names = case.batch(), ("rewards", "loss_weight", "action_offsets", "group_ids", "trajectory_ids", "turn", "finished")
    before = {name: _copied(getattr(batch, name)) for name in names}
    columns = {name: _copied(column) for name, column in batch.columns.items()}
    try:
        _made(subject, batch)
    except EngineError as error:
        raise Undecidable(error.cause) from error
    changed = [name for name, array in before.items() if not np.array_equal(array, getattr(batch, name))]
    changed += [f"columns[{name!r}]" for name, array in columns.items() if not np.array_equal(array, batch.columns[name])]
    if changed:
        raise Broken(f"changes batch.{changed[0]} in place, which the engine reads afterwards", "Work on a copy: x - y, not x -= y")


def _copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.copy()


@promise("It gives the same bytes for the same batch, in every call and whatever the random state", cases=_drawn, first=_crowd)
def repeatable(subject: Subject[Any], case: DrawnRows) -> None:
    product, made = subject.make(), []
    with restored_random_state():
        for seed in range(12):
            seed_everything(seed)
            before, batch = global_random_state(), case.batch()
            try:
                with blaming(Owner.named(subject.label, "advantage"), "__call__"):
                    result = product(batch)
                output = as_advantage_output(subject.label, result, batch, returns=product.claims.returns)
                made.append([each.tobytes() for each in (output.advantages, output.returns) if each is not None])
            except EngineError as error:
                raise Undecidable(error.cause) from error
            if global_random_state() != before:
                raise Broken("draws from the global random state", "Let advantages be a function of the batch alone")
    if any(each != made[0] for each in made):
        raise Broken(
            "gives other numbers from one call to the next: it keeps something, or draws numbers",
            "Let advantages be a function of the batch alone",
        )


def _answer(subject: Subject[Any], case: DrawnRows) -> bytes:
    try:
        return _made(subject, case.batch()).advantages.tobytes()
    except EngineError as error:
        raise Undecidable(error.cause) from error


_process_settings, _another_rank, _another_process = process_promises(_answer, _drawn, _crowd)

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
