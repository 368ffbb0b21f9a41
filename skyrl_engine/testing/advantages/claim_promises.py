"""Promises that an estimator makes by what it claims: of groups, of shifted and scaled rewards, of sums and of order."""

from typing import Any

import numpy as np
from attrs import evolve

from skyrl_engine.testing.advantages import batches
from skyrl_engine.testing.advantages.answers import (
    TOLERANCE,
    answers,
    collect_first_values,
    draw_rows,
    estimate_or_undecidable,
    list_crowd,
    list_explicit,
    require_same,
    require_same_answers,
    undecidable_unless_repeatable,
)
from skyrl_engine.testing.advantages.batches import DrawnRows
from skyrl_engine.testing.promise import Broken, promise
from skyrl_engine.testing.subject import Subject

FAR = 2.0**30
"""Added to a reward of `REWARDS`, it is exact in float64, not in float32; a variance of it by squares is exact in neither."""


def _whole_batch(subject: Subject[Any]) -> str | None:
    return "the estimator claims whole_batch: groups reach each other by nature" if subject.make().claims.whole_batch else None


MOST_GROUPS = 4
"""Groups of a batch whose rewards are changed, one after the other."""


@promise("The rewards of one group change nothing in another", cases=draw_rows, exempt=_whole_batch, first=list_explicit)
@undecidable_unless_repeatable
def groups_apart(subject: Subject[Any], case: DrawnRows) -> None:
    group_of = {sample.key: sample.group for sample in case.samples}
    before, earned = answers(subject, case), case.collect_rewards()
    for changed_group in sorted(set(group_of.values()))[:MOST_GROUPS]:
        # rewards further apart, and a tie: what is cut at a quantile of the batch is cut at a higher and at a lower one
        for extra in (lambda key: 4.0 * (key + 1), lambda key: -earned[key]):
            changed = case.with_rewards(lambda key, extra=extra, group=changed_group: extra(key) if group_of[key] == group else 0.0)  # type: ignore[misc]
            require_same_answers(
                before,
                answers(subject, changed),
                "when rewards of another group change",
                "it counts over the batch",
                "Compare within groups, or claim whole_batch",
                of={key for key, group in group_of.items() if group != changed_group},
            )


def _exempt_unless_groups_needed(subject: Subject[Any]) -> str | None:
    return "the estimator compares trajectories of a group" if subject.make().claims.groups == "needed" else _whole_batch(subject)


@promise(
    "Where it claims to ignore groups, the rewards of one trajectory change nothing in another",
    cases=draw_rows,
    exempt=_exempt_unless_groups_needed,
    first=list_explicit,
)
@undecidable_unless_repeatable
def trajectories_apart(subject: Subject[Any], case: DrawnRows) -> None:
    changed_key = case.samples[0].key
    before, others = answers(subject, case), {sample.key for sample in case.samples} - {changed_key}
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
        after = answers(subject, case.with_rewards(lambda key, more=more: more if key == changed_key else 0.0))  # type: ignore[misc]
        require_same_answers(before, after, "when rewards of another trajectory change", cause, remedy, of=others)


def _no_outcome(subject: Subject[Any]) -> str | None:
    return None if subject.make().claims.outcome else "the estimator does not claim outcome: tokens have values of their own"


@promise(
    "The number of samples that a trajectory is cut into changes nothing",
    cases=lambda s: draw_rows(s, turns=3),
    exempt=_no_outcome,
    first=list_explicit,
)
@undecidable_unless_repeatable
def turns(subject: Subject[Any], case: DrawnRows) -> None:
    values = estimate_or_undecidable(subject, case)
    for (trajectory, place), value in values.items():
        if not np.isclose(value, first := values[trajectory, 0], rtol=TOLERANCE, atol=TOLERANCE):
            raise Broken(
                f"scored token {place} of trajectory {trajectory} has the advantage {value:.6g}, and its first {first:.6g}: it claims outcome",
                "Give all tokens of a trajectory one value (batch.spread), or do not claim outcome",
            )
    require_same(
        values,
        estimate_or_undecidable(subject, batches.join_turns(case)),
        "when a trajectory is one sample instead of several",
        "it counts samples, not trajectories",
        "Take rewards from batch.trajectory_rewards(), one per trajectory",
    )


@promise(
    "A reward counts the same at a token that is not scored",
    cases=lambda s: draw_rows(s, empty=False),
    exempt=_no_outcome,
    first=list_crowd,
)
@undecidable_unless_repeatable
def rewards_anywhere(subject: Subject[Any], case: DrawnRows) -> None:
    require_same_answers(
        answers(subject, case),
        answers(subject, batches.move_rewards_behind(case)),
        "when its reward stands at an observed token behind the last one",
        "rewards of tokens that are not scored are lost",
        "Take rewards from batch.trajectory_rewards(), which adds up all tokens",
    )


def _exempt_unless_claiming(flag: str) -> Any:
    def exempt(subject: Subject[Any]) -> str | None:
        return None if getattr(subject.make().claims, flag) else f"the estimator does not claim {flag}"

    return exempt


def _no_groups(subject: Subject[Any]) -> str | None:
    return None if subject.make().claims.groups == "needed" else "the estimator does not compare trajectories of a group"


@promise(
    "A constant added to all rewards of the batch changes nothing",
    cases=lambda s: draw_rows(s, empty=False),
    exempt=_exempt_unless_claiming("shift"),
    first=list_crowd,
)
@undecidable_unless_repeatable
def shift(subject: Subject[Any], case: DrawnRows) -> None:
    before = estimate_or_undecidable(subject, case)
    require_same(
        before,
        estimate_or_undecidable(subject, case.with_rewards(lambda _key: 8.0)),
        "when every reward is 8 more",
        "the baseline is not the mean of all that it is subtracted from",
        "Subtract the mean of the finished trajectories' rewards, or do not claim shift",
    )
    require_same(
        before,
        estimate_or_undecidable(subject, case.with_rewards(lambda _key: FAR)),
        f"when every reward is {FAR:,.0f} more",
        "what is left of large numbers when they are subtracted has lost its digits",
        "Compute in float64, and take the variance of rewards less their mean, not the mean of their squares less that of the mean",
    )


@promise(
    "Rewards times 3 give advantages times 3, or the same ones, as it claims",
    cases=draw_rows,
    exempt=_exempt_unless_claiming("scale"),
    first=list_explicit,
)
@undecidable_unless_repeatable
def scale(subject: Subject[Any], case: DrawnRows) -> None:
    claimed = subject.make().claims.scale
    larger = tuple(
        # no power of 2, by which a rounded number is multiplied without a trace
        evolve(sample, tokens=tuple(evolve(token, reward=3 * token.reward) for token in sample.tokens))
        for sample in case.samples
    )
    before, after = estimate_or_undecidable(subject, case), estimate_or_undecidable(subject, evolve(case, samples=larger))
    expected = {place: value * (3 if claimed == "linear" else 1) for place, value in before.items()}
    require_same(expected, after, "where the claim gives the former", f"it claims scale = {claimed!r}", "Correct it, or the claim")


@promise(
    "Equal rewards give exactly 0, whatever they are and over however many turns they were earned",
    cases=lambda s: batches.draw_equal(s.make().needs),
    exempt=_no_groups,
    first=lambda s: batches.list_tied(s.make().needs),
)
def equal_rewards(subject: Subject[Any], case: DrawnRows) -> None:
    for (trajectory, _), value in estimate_or_undecidable(subject, case).items():
        if value != 0:
            raise Broken(
                f"gives trajectory {trajectory} the advantage {value:.6g} where all rewards of its group are equal: a rounded mean is not "
                "the reward itself, and sums of turns differ in their last bits",
                "Take rewards from batch.trajectory_rewards(), and give 0 where the largest of a group is the smallest",
            )


@promise(
    "The values of a group's trajectories add up to 0",
    cases=lambda s: draw_rows(s, even=True),
    exempt=_exempt_unless_claiming("zero_sum"),
    first=list_crowd,
)
@undecidable_unless_repeatable
def zero_sum(subject: Subject[Any], case: DrawnRows) -> None:
    group_of = {sample.key: sample.group for sample in case.samples}
    totals: dict[int, float] = {}
    for trajectory, value in collect_first_values(estimate_or_undecidable(subject, case)).items():
        totals[group_of[trajectory]] = totals.get(group_of[trajectory], 0.0) + value
    for group, total in totals.items():
        if abs(total) > TOLERANCE:
            raise Broken(
                f"the values of group {group} add up to {total:.6g}",
                "Subtract the mean of the finished trajectories' rewards, or do not claim zero_sum",
            )


@promise(
    "Inside a group, a higher reward never has a lower advantage",
    cases=lambda s: draw_rows(s, even=True),
    exempt=_no_groups,
    first=list_crowd,
)
def monotone(subject: Subject[Any], case: DrawnRows) -> None:
    values = collect_first_values(estimate_or_undecidable(subject, case))
    finished = {sample.key: sample for sample in case.samples if sample.key in values}
    for one in finished.values():
        for other in finished.values():
            is_higher = _reward(one) > _reward(other)
            if one.group == other.group and is_higher and values[one.key] < values[other.key] - TOLERANCE:
                raise Broken(
                    f"the reward {_reward(one):g} has the advantage {values[one.key]:.6g}, and the lower reward {_reward(other):g} of the "
                    f"same group {values[other.key]:.6g}",
                    "Look for a sign, or a division by a number below 0",
                )


def _reward(sample: batches.DrawnSample) -> float:
    return sum(token.reward for token in sample.tokens)
