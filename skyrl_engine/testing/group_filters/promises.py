"""Promises of every group filter."""

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.group_filter import GroupView, as_drop_reason
from skyrl_engine.errors import EngineError
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.testing.group_filters.views import (
    ShownGroup,
    draw_group,
    extreme_groups,
    large_groups,
    list_rounding_pairs,
    various_groups,
)
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.process_promises import process_promises
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, promise
from skyrl_engine.testing.random_state import global_random_state, restore_random_state, seed_everything
from skyrl_engine.testing.subject import Subject

MOST_REASONS = 4
_PURE = "Let the answer be a function of the group alone"


def _draw_one(_subject: Subject[Any]) -> "st.SearchStrategy[ShownGroup]":
    return draw_group()


def _list_explicit(_subject: Subject[Any]) -> list[ShownGroup]:
    return [*large_groups(), *extreme_groups()]


def _draw_many(_subject: Subject[Any]) -> "st.SearchStrategy[Groups]":
    return st.lists(draw_group(most=2, plain=True), min_size=2, max_size=8).map(Groups)


class Groups(list[ShownGroup]):
    """Groups in the order in which they end, which describe themselves in words."""

    def __str__(self) -> str:
        return "\nthen ".join(str(group) for group in self)


def _ask(subject: Subject[Any], product: Any, view: GroupView) -> str | None:
    """Return the answer as the engine takes it. Raises the error that a run would show."""
    with blame(Owner.of_unrecorded(subject.label, "group_filter"), "__call__"):
        answer = product(view)
    return as_drop_reason(subject.label, answer)


def _answers(subject: Subject[Any], groups: Sequence[ShownGroup], product: Any = None) -> list[str | None]:
    """Return answers of one filter (a new one, or `product`). Raises Undecidable where it fails or returns something else."""
    group_filter = subject.make() if product is None else product
    try:
        return [_ask(subject, group_filter, group.view()) for group in groups]
    except EngineError as error:
        raise Undecidable(error.cause) from error


def _describe_answer(answer: str | None) -> str:
    return "keeps the group" if answer is None else f"drops it as {answer!r}"


@promise("It returns None or a short text, also for a group of one", cases=_draw_one, first=_list_explicit)
def answer(subject: Subject[Any], case: ShownGroup) -> None:
    try:
        _ask(subject, subject.make(), case.view())
    except EngineError as error:
        raise Broken(error.cause, error.remedy) from error


def _has_no_oracle(subject: Subject[Any]) -> str | None:
    return None if "oracle" in subject.hooks else "there is no oracle to compare with"


@promise("Its answers are those of the oracle", cases=_draw_one, exempt=_has_no_oracle, first=_list_explicit)
def oracle(subject: Subject[Any], case: ShownGroup) -> None:
    (returned,) = _answers(subject, [case])
    expected = subject.hooks["oracle"](case.view())
    if returned != expected:
        raise Broken(f"{_describe_answer(returned)}, where the oracle {_describe_answer(expected)}", "Compare the two")


def _draw_reordered(_subject: Subject[Any]) -> "st.SearchStrategy[Groups]":
    def reorder(group: ShownGroup) -> "st.SearchStrategy[Groups]":
        return st.permutations(group.attempts).map(lambda order: Groups([group, evolve(group, attempts=tuple(order))]))

    return draw_group().flatmap(reorder)


def _reverse_explicit(subject: Subject[Any]) -> list[Groups]:
    return [Groups([group, evolve(group, attempts=group.attempts[::-1])]) for group in _list_explicit(subject)]


@promise("The order of the attempts changes nothing", cases=_draw_reordered, first=_reverse_explicit, effort=3)
def member_order(subject: Subject[Any], case: Groups) -> None:
    one, other = (_answers(subject, [group])[0] for group in case)
    if one != other:
        raise Broken(
            f"{_describe_answer(one)}, and in another order of attempts {_describe_answer(other)}",
            "Compare no attempt with its neighbour; add up with math.fsum where a bound decides",
        )


@promise("What float64 rounds, or float16 and float32 cannot tell apart, decides nothing")
def rounding(subject: Subject[Any], _case: None) -> None:
    for one, other in list_rounding_pairs():
        first, second = _answers(subject, [one, other])
        if (first is None) != (second is None):
            raise Broken(
                f"{_describe_answer(first)} of the rewards {_list_rewards(one)}, and of {_list_rewards(other)} it "
                f"{_describe_answer(second)}: a rounded number decides",
                "Compare rewards themselves, in float64: group.rewards.max() == group.rewards.min(), not group.rewards.std() == 0",
            )


def _list_rewards(group: ShownGroup) -> str:
    rewards = [attempt.reward for attempt in group.attempts]
    return f"{len(rewards)} times {rewards[0]!r}" if len(set(rewards)) == 1 else ", ".join(map(repr, rewards))


@promise("What it saw before changes nothing", cases=_draw_many)
def no_memory(subject: Subject[Any], case: Groups) -> None:
    together = _answers(subject, case)
    for group, after in zip(case, together, strict=True):
        (alone,) = _answers(subject, [group])
        if alone != after:
            raise Broken(
                f"{_describe_answer(alone)} that it sees first, and after others {_describe_answer(after)}: it keeps something",
                _PURE,
            )


@promise("It gives few reasons, which are names of metrics", cases=_draw_many, first=lambda _subject: [Groups(various_groups())])
def few_reasons(subject: Subject[Any], case: Groups) -> None:
    reasons = sorted({reason for reason in _answers(subject, case) if reason is not None})
    if len(reasons) > max(MOST_REASONS, len(case) // 6):
        raise Broken(
            f"gives {len(reasons)} reasons for {len(case)} groups: {', '.join(map(repr, reasons[:3]))}, ...",
            "Leave numbers and names of the group out of the reason",
        )


@promise("It does not change the group", cases=_draw_one, first=_list_explicit)
def inputs_unchanged(subject: Subject[Any], case: ShownGroup) -> None:
    view, before = case.view(), case.view()
    try:
        _ask(subject, subject.make(), view)
    except EngineError as error:
        raise Undecidable(error.cause) from error
    for name in ("rewards", "success", "lengths", "truncated"):
        if getattr(view, name).tobytes() != getattr(before, name).tobytes():
            raise Broken(f"changes group.{name} in place, which the next filter reads", "Work on a copy: np.sort(x), not x.sort()")


@promise("It answers the same in every call and whatever the random state, which it leaves alone", cases=_draw_one)
def repeatable(subject: Subject[Any], case: ShownGroup) -> None:
    product, answers = subject.make(), []
    with restore_random_state():
        for seed in range(12):
            seed_everything(seed)
            before = global_random_state()
            answers += _answers(subject, [case], product)
            if global_random_state() != before:
                raise Broken("draws from the global random state", _PURE)
    if len(set(answers)) > 1:
        raise Broken(
            f"{_describe_answer(answers[0])} and, asked again, another time does not: it keeps something, or draws numbers", _PURE
        )


def _answer(subject: Subject[Any], case: Groups) -> list[str | None]:
    return _answers(subject, case)


_process_settings, _another_rank, _another_process = process_promises(
    _answer, _draw_many, lambda _subject: [Groups(large_groups())]
)

GROUP_FILTER_PROMISES: tuple[Promise[Any, Any], ...] = (
    _process_settings,  # first: once set they are set
    repeatable,  # soon: what wears off after some calls is seen while it lasts
    _another_rank,
    answer,
    oracle,
    member_order,
    rounding,
    no_memory,
    few_reasons,
    inputs_unchanged,
    _another_process,  # late: it takes seconds to start
    *PLUGIN_PROMISES,
)
