"""Groups of a step: filtered, recorded before they count, taken in the order of tickets, and found again in the journal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, evolve, field

from skyrl_engine.contracts.kinds.environment import Task
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import PluginBrokenError
from skyrl_engine.registry.owner import Owner
from skyrl_engine.rollout.group_source import RolloutSource, view_of
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import read_index
from skyrl_engine.rollout.ledger import RolloutLedger
from skyrl_engine.testing.rollout_cases import plain_group


@define
class Runner:
    """Ends the newest group first; `make(ticket)` says what came of it."""

    make: Callable[[int], Group]
    waiting: list[int] = field(factory=list)
    started: list[int] = field(factory=list)

    def start(self, ticket: int, environment: int, task: Task, version: int) -> None:
        assert (environment, task.key, version) == (0, f"task-{ticket}", 0)
        self.waiting.append(ticket)
        self.started.append(ticket)

    def advance(self, timeout: float) -> list[Group]:
        assert timeout > 0
        return [self.make(self.waiting.pop())]


def part(function: Callable[..., Any]) -> Any:
    return SimpleNamespace(product=function, owner=Owner("group_filter mine", "Correct it"), label="group_filter mine")


Source = Callable[..., RolloutSource]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    """`source(make, *filters, **rules)`: a source of steps of three groups, whose journal is closed with the test."""
    with open_journal(tmp_path, run="a") as journal:

        def make_source(make: Callable[[int], Group] = plain_group, *filters: Any, **rules: Any) -> RolloutSource:
            runner: Any = Runner(make)
            ledger = RolloutLedger(3, order="ticket", **rules)
            return RolloutSource(ledger, runner, journal, lambda ticket: (0, Task(f"task-{ticket}", prompt_ids=(1,))), filters)

        yield make_source


def test_a_step_gets_its_groups_by_ticket_whatever_ends_first(source: Source, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    groups = source()
    groups.progress = lambda ready, wanted: progress.append((ready, wanted))
    taken = groups.take(1)
    assert [group.ticket for group in taken.groups] == [0, 1, 2]
    assert [group.ticket for group in taken.ended] == [0, 1, 2]
    assert progress == [(1, 3), (2, 3), (3, 3)]
    groups.journal.commit()
    assert sorted(read_index(tmp_path).groups) == [0, 1, 2], "recorded before they are trained on"
    groups.finish_step(1, taken.groups, [])
    groups.publish(1)
    assert read_index(tmp_path).steps() == {0: 1, 1: 1, 2: 1}


def test_dropped_and_failed_groups_are_replaced_and_reported(source: Source, tmp_path: Path) -> None:
    def make(ticket: int) -> Group:
        group = plain_group(ticket, rewards=(1.0, 1.0) if ticket == 1 else (1.0, 0.0))
        return evolve(group, dropped="failed") if ticket == 2 else group

    groups = source(make, part(lambda view: "equal" if len(set(view.rewards)) == 1 else None))
    taken = groups.take(1)
    assert [group.ticket for group in taken.groups] == [0, 3, 4]
    assert {group.ticket: group.dropped for group in taken.ended} == {0: None, 1: "equal", 2: "failed", 3: None, 4: None}
    groups.journal.commit()
    records = read_index(tmp_path).list_journaled_groups()
    assert (records[1].dropped, records[2].failed, records[0].dropped) == ("equal", True, None)


def test_a_resumed_step_reports_what_it_reported(source: Source, tmp_path: Path) -> None:
    def make(ticket: int) -> Group:
        group = plain_group(ticket, rewards=(1.0, 1.0) if ticket == 1 else (1.0, 0.0))
        return evolve(group, dropped="failed") if ticket == 2 else group

    groups = source(make, part(lambda view: "equal" if len(set(view.rewards)) == 1 else None))
    state = groups.state()
    taken = groups.take(1)
    groups.journal.commit()
    index = read_index(tmp_path)
    groups.journal.index.groups = index.groups
    again = source(make)
    again.ledger = RolloutLedger.from_state(state, again.ledger, index.list_journaled_groups())
    resumed = again.take(1)
    assert [group.ticket for group in resumed.groups] == [0, 3, 4]
    assert {group.ticket: group.dropped for group in resumed.ended} == {group.ticket: group.dropped for group in taken.ended}


def test_filters_are_suspended_where_they_would_drop_everything(source: Source) -> None:
    groups = source(plain_group, part(lambda _view: "never"), max_drop_share=0.5)
    taken = groups.take(1)
    assert len(taken.groups) == 3
    assert all(group.dropped is None for group in taken.groups)
    assert groups.ledger.kept >= 3


def test_a_filter_that_fails_is_named(source: Source) -> None:
    groups = source(plain_group, part(lambda view: view.nothing))
    with pytest.raises(PluginBrokenError, match="mine"):
        groups.take(1)


def test_no_filter_changes_what_the_next_one_sees() -> None:
    view = view_of(plain_group(0))
    for values in (view.rewards, view.success, view.lengths, view.truncated):
        with pytest.raises(ValueError, match="read-only"):
            values[:] = 0


def test_filters_see_what_did_not_fail() -> None:
    group = plain_group(0, rewards=(2.0, 0.0))
    broken = evolve(group.trajectories[0], status="failed", cause="hung")
    view = view_of(evolve(group, trajectories=(broken, group.trajectories[1])), staleness=2)
    assert (view.rewards.tolist(), view.success.tolist(), view.lengths.tolist(), view.staleness) == ([0.0], [False], [3], 2)
