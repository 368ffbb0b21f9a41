"""Batches of groups for the steps of a trainer: started, filtered, recorded, taken in their order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from attrs import define, evolve, field, frozen

from skyrl_engine.contracts.kinds.environment import Task
from skyrl_engine.contracts.kinds.group_filter import GroupFilter, GroupView, as_drop_reason
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame
from skyrl_engine.rollout.arrow_codec import LearnedAttempt
from skyrl_engine.rollout.journal import Journal
from skyrl_engine.rollout.ledger import RolloutLedger
from skyrl_engine.rollout.runner import RolloutRunner
from skyrl_engine.spans import Phases

_PATIENCE_S: Final = 1.0

Result = TypeVar("Result")

Valued = Callable[[Sequence[Group]], Sequence[Group]]
"""Returns groups with what a model adds to the rewards of their attempts."""


@frozen(eq=False)
class StepBatch:
    """The groups of one step, by ticket: those to train on, and `ended`, these with what was left out, dropped groups with their reason."""

    groups: tuple[Group, ...]
    ended: tuple[Group, ...]


class GroupSource(Protocol):
    """A source of groups for a trainer: sampled now, or recorded before."""

    @property
    def step(self) -> int:
        """Count the steps that were trained."""

    def take(self, step: int) -> StepBatch:
        """Return the groups of a step, counted from 1."""

    def finish_step(self, step: int, groups: Sequence[Group], learned: Sequence[LearnedAttempt]) -> None:
        """Take the end of the step that trained on these groups, and what it learned from their attempts."""

    def publish(self, version: int) -> None:
        """Take it that the trained weights are those of `version`."""

    def at_rest(self, work: "Callable[[], Result]") -> "Result":
        """Do something while the sampler holds the weights of the last step and no update comes."""

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps, as JSON values; called in `at_rest`."""


@define(eq=False)
class RolloutSource:
    """Gives a trainer its groups, step by step; the trainer reports when it has trained on them.

    `task_of(ticket)` gives the number of a ticket's environment, and its task. `valued` adds to the rewards of every group that ended, and sees
    one at a time, so that what it adds depends on nothing that ended at the same time. `on_ended`, where it is set, gets groups in its place,
    and each comes back by `take_in`. `filters` then drop groups, where the ledger lets them.
    `update(version)` gives the sampler the trained weights. `progress(ready, wanted)` is called while a step waits. Time that goes by in
    `valued` counts as `score` among `phases`, time in the journal as `journal`.
    """

    ledger: RolloutLedger
    runner: RolloutRunner
    journal: Journal
    task_of: Callable[[int], tuple[int, Task]]
    filters: Sequence[BoundPlugin[GroupFilter]] = ()
    valued: Valued | None = None
    on_ended: Callable[[Group], None] | None = None
    update: Callable[[int], object] | None = None
    progress: Callable[[int, int], None] | None = None
    phases: Phases = field(factory=Phases)
    _groups: dict[int, Group] = field(factory=dict, init=False)
    _ended: dict[int, Group] = field(factory=dict, init=False)

    def take(self, step: int) -> StepBatch:
        """Wait for the groups of a step, counted from 1. Raises RolloutError where attempts fail, or filters drop too many groups."""
        while (batch := self.take_ready(step)) is None:
            self._start_tickets()
            if self.ledger.next_batch(step) is not None:
                continue  # out of the journal
            self._run_attempts(_PATIENCE_S)
            if self.progress is not None:
                self.progress(self.ready, self.ledger.groups)
        return batch

    def advance(self, timeout: float) -> None:
        """Start what may start, and run attempts for about `timeout` seconds, or until a group has ended. Raises as `take` does."""
        self._start_tickets()
        if self.runner.running:
            self._run_attempts(timeout)

    @property
    def can_advance(self) -> bool:
        """True where groups are under way or may start."""
        return self.runner.running > 0 or self.ledger.may_start() > 0

    @property
    def ready(self) -> int:
        """Count the groups that may be trained on."""
        return len(self.ledger.ready())

    def take_ready(self, step: int) -> StepBatch | None:
        """Return the groups of a step, counted from 1; None while they are not all there."""
        if (tickets := self.ledger.next_batch(step)) is None:
            return None
        for ticket in self.ledger.pop_recalled():
            self._ended[ticket] = self.journal.index.groups[ticket].group()
        groups = tuple(self._group(ticket) for ticket in tickets)
        for ticket in tickets:
            self._ended.pop(ticket, None)
        # in the order of tickets, what was left out belongs to the step that comes past it, whenever it ended
        last = max(tickets) if self.ledger.in_order else None
        ended = {**{group.ticket: group for group in groups}, **self._pop_left_out(last)}
        return StepBatch(groups, tuple(ended[ticket] for ticket in sorted(ended)))

    def finish_step(self, step: int, groups: Sequence[Group], learned: Sequence[LearnedAttempt]) -> None:
        """Take the end of the step that trained on these groups, and what it learned from their attempts."""
        tickets = tuple(group.ticket for group in groups)
        self.ledger.finish_step(step, tickets)
        with self.phases("journal"):
            self.journal.record_step(step, tickets, learned)
        for ticket in tickets:
            self._groups.pop(ticket, None)

    def publish(self, version: int) -> None:
        """Give the sampler the trained weights, those of `version`: groups that start from now on start with them."""
        if self.update is not None:
            self.update(version)
        self.ledger.publish(version)

    def at_rest(self, work: Callable[[], Result]) -> Result:
        """Do something now: nothing is sampled between two calls."""
        return work()

    @property
    def step(self) -> int:
        """Count the steps that were trained."""
        return self.ledger.step

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps; what it says of groups is on the disk by then."""
        self.journal.commit()
        return self.ledger.state()

    def _start_tickets(self) -> None:
        for ticket in self.ledger.start_tickets():
            environment, task = self.task_of(ticket)
            self.runner.start(ticket, environment, task, self.ledger.version)

    def _run_attempts(self, timeout: float) -> None:
        for group in self.runner.advance(timeout):
            if self.on_ended is None:
                self.take_in(self._value(group))
            else:
                self.on_ended(group)
        with self.phases("journal"):
            self.journal.poll()

    def _group(self, ticket: int) -> Group:
        group = self._groups.get(ticket)
        return evolve(self.journal.index.groups[ticket].group(), dropped=None) if group is None else group

    def _value(self, group: Group) -> Group:
        if self.valued is None:
            return group
        with self.phases("score"):
            (valued,) = self.valued([group])
        return valued

    def take_in(self, group: Group) -> None:
        """Record a group that ended, with all of its rewards, unless a filter drops it."""
        if group.dropped is not None:
            with self.phases("journal"):
                self.journal.append(group, failed=True)
            self.ledger.fail_group(group.ticket)
            self._ended[group.ticket] = group
            return
        reason = self._find_drop_reason(group)
        with self.phases("journal"):
            self.journal.append(evolve(group, dropped=reason))
        self._groups[group.ticket] = group
        self._ended[group.ticket] = evolve(group, dropped=reason)
        if reason is None:
            self.ledger.finish_group(group.ticket)
        else:
            self.ledger.drop_group(group.ticket, reason)

    def _pop_left_out(self, last: int | None) -> dict[int, Group]:
        """Return the groups up to the ticket `last` that ended and are not trained on, and forget them."""
        left_out = {
            ticket: group
            for ticket, group in self._ended.items()
            if self.ledger.state_of(ticket) == "done" and (last is None or ticket <= last)
        }
        for ticket in left_out:
            del self._ended[ticket]
            self._groups.pop(ticket, None)
        return left_out

    def _find_drop_reason(self, group: Group) -> str | None:
        return drop_reason(group, self.filters, staleness=self.ledger.version - group.start_version)


def drop_reason(group: Group, filters: Sequence[BoundPlugin[GroupFilter]], *, staleness: int = 0) -> str | None:
    """Ask filters, in their order, for a reason to drop a group; None: there is none."""
    if not filters:
        return None
    view = view_of(group, staleness=staleness)
    for part in filters:
        with blame(part.owner, "its call"):
            answer = part.product(view)
        if (reason := as_drop_reason(part.label, answer)) is not None:
            return reason
    return None


def view_of(group: Group, *, staleness: int = 0) -> GroupView:
    """Return what filters see of a group."""
    attempts = group.finished
    view = GroupView(
        environment=group.environment,
        rewards=group.rewards,
        success=np.array([bool(attempt.success) for attempt in attempts], dtype=np.bool_),
        lengths=np.array([len(attempt.logprobs) for attempt in attempts], dtype=np.int64),
        truncated=np.array([attempt.status == "truncated" for attempt in attempts], dtype=np.bool_),
        staleness=staleness,
    )
    # what one filter leaves, the next one sees
    for values in (view.rewards, view.success, view.lengths, view.truncated):
        values.setflags(write=False)
    return view
