"""Promises of environments that compare the attempts of a group."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

from skyrl_engine.contracts.kinds.environment import EndedAttempt, Task
from skyrl_engine.rollout.episode_process import wrong_comparison
from skyrl_engine.testing.environments.bench import format_error, shorten, to_plain
from skyrl_engine.testing.environments.compared import (
    TEXTS,
    ComparedGroup,
    call_compare,
    compare_attempts,
    compare_group,
    group_of,
    groups,
    list_groups,
    play_group,
)
from skyrl_engine.testing.promise import Broken, Undecidable, any_of, promise
from skyrl_engine.testing.random_state import restore_random_state, seed_everything
from skyrl_engine.testing.subject import Subject

FEW = 0.2
"""Effort: every case plays a group of attempts."""

ROUNDING = 1e-6
"""Two rewards that differ by no more, relative to 1 or to the larger one, differ by the order in which numbers were added up."""

GARBAGE = ("", "\x00\x01\ufffd\u202e", "((((((((", "1e400", "9" * 5000, "\u00b2", "null", "a" * 2**20)
"""Answers that mean nothing, all in one group."""


def _compares_nothing(subject: Subject[Any]) -> str | None:
    return None if subject.make().claims.compares else "the environment does not claim to compare attempts"


def _is_random(subject: Subject[Any]) -> str | None:
    return "the environment claims random: it may compare otherwise" if subject.make().claims.random else None


def _has_an_order(subject: Subject[Any]) -> str | None:
    return "the environment claims order_matters" if subject.make().claims.order_matters else None


@promise(
    "A group is compared with one StepResult per attempt: finite numbers, also of garbage and of equal attempts",
    cases=groups,
    exempt=_compares_nothing,
    effort=FEW,
    first=lambda subject: [*list_groups(subject), group_of(GARBAGE)],
)
def comparisons(subject: Subject[Any], case: ComparedGroup) -> None:
    environment = subject.make()
    task, attempts = play_group(subject, environment, case)
    for chosen in (attempts, attempts[:2]):
        try:
            results = call_compare(environment, task, list(chosen))
        except Exception as error:
            raise Broken(
                f"compare raises {format_error(error)} for {len(chosen)} attempts",
                "Give a reward for every text, such as 0 for what cannot be read, and compare any two attempts or more",
            ) from error
        if (wrong := wrong_comparison(results, len(chosen))) is not None:
            raise Broken(wrong, "Return one StepResult per attempt, in their order, with a finite number for every text")
        for result in results:
            try:
                to_plain(result)
            except Undecidable as error:
                raise Broken(f"info is {result.info!r:.120}: {error}", "Keep texts, numbers, lists and mappings in info") from error


@promise(
    "The same attempts are rewarded alike when they are compared again, whatever was compared before and whatever the random state",
    cases=groups,
    exempt=any_of(_compares_nothing, _is_random),
    effort=FEW,
    first=list_groups,
)
def comparisons_repeat(subject: Subject[Any], case: ComparedGroup) -> None:
    task, attempts = play_group(subject, subject.make(), case)
    made_again = []
    with restore_random_state():
        for seed in range(2):
            seed_everything(seed)
            made_again.append(compare_attempts(subject.make(), task, attempts))
        environment = subject.make()
        first = compare_attempts(environment, task, attempts)
        for other in (group_of(TEXTS), ComparedGroup(case.attempts[:1] * 2, (1, 0))):
            with suppress(Undecidable):
                compare_group(subject, environment, other)
        again = compare_attempts(environment, task, attempts)
    _require_same(made_again[0], made_again[1], "it draws numbers that nothing decides")
    _require_same(first, again, "the environment remembers what it compared before")


def _require_same(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], cause: str) -> None:
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if mine != theirs:
            raise Broken(
                f"attempt {number} is given {shorten(theirs)}, and was given {shorten(mine)}: {cause}",
                "Let a comparison be a function of the task and the attempts, or claim random",
            )


@promise(
    "Another order of the attempts gives each the same reward, up to rounding, and equal attempts the same, unless it claims order_matters",
    cases=groups,
    exempt=any_of(_compares_nothing, _is_random, _has_an_order),
    effort=2 * FEW,
    first=list_groups,
)
def attempt_order(subject: Subject[Any], case: ComparedGroup) -> None:
    environment = subject.make()
    task, attempts = play_group(subject, environment, case)
    straight = compare_attempts(environment, task, attempts)
    if straight != compare_attempts(subject.make(), task, attempts):
        raise Undecidable("the same attempts are compared otherwise each time")
    turned = compare_attempts(environment, task, [attempts[number] for number in case.order])
    for number, theirs in zip(case.order, turned, strict=True):
        mine = straight[number]
        if not _are_close(mine, theirs):
            raise Broken(
                f"attempt {number} ({attempts[number].text!r:.40}) is given {shorten(theirs)} in another order of the attempts, "
                f"and {shorten(mine)} in the first",
                "Favour no place: give equal texts equal rewards, ask a judge in both orders, or claim order_matters",
            )


def _are_close(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say if two attempts are given the same, up to the order in which numbers were added up."""
    ones, others = ({"reward": given["reward"], **given["parts"]} for given in (one, other))
    return (
        one["success"] == other["success"]
        and one["parts"].keys() == other["parts"].keys()
        and all(abs(ones[name] - others[name]) <= ROUNDING * max(1.0, abs(ones[name])) for name in ones)
    )


@promise(
    "compare changes neither the task nor the attempts nor their list",
    cases=groups,
    exempt=_compares_nothing,
    effort=FEW,
    first=list_groups,
)
def attempts_unchanged(subject: Subject[Any], case: ComparedGroup) -> None:
    environment = subject.make()
    task, attempts = play_group(subject, environment, case)
    shown, before = deepcopy((task, attempts)), _write(task, attempts)
    try:
        call_compare(environment, *shown)
    except Exception as error:
        raise Undecidable(f"compare fails: {format_error(error)}") from error
    for what, is_now, was in zip(("the task", "the attempts, or their list,"), _write(*shown), before, strict=True):
        if is_now != was:
            raise Broken(f"changes {what} that it is given", "Work on a copy: sorted(texts), not texts.sort()")


def _write(task: Task, attempts: Sequence[EndedAttempt]) -> tuple[str, str]:
    return json.dumps(to_plain(task)), json.dumps([to_plain(attempt) for attempt in attempts])
