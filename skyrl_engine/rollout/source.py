"""Batches of groups for the steps of a trainer: started, filtered, recorded, taken in their order."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import numpy as np
from attrs import define, evolve, field

from skyrl_engine.contracts.kinds.environment import Task
from skyrl_engine.contracts.kinds.group_filter import GroupFilter, GroupView
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import ContractError, RolloutError
from skyrl_engine.registry.host import blaming
from skyrl_engine.registry.part import Part
from skyrl_engine.rollout.ledger import RolloutLedger
from skyrl_engine.rollout.runner import RolloutRunner

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 1.0


class GroupRecords(Protocol):
    """The journal: what is written there was finished or dropped, and need not be sampled again."""

    def find(self, ticket: int) -> Group | None:
        """The group of a ticket, if one was recorded."""

    def append(self, group: Group) -> None:
        """Record a group."""


@define(eq=False)
class Taken:
    """The groups of one step: those to train on, in the order of their tickets, and all that finished since the step before."""

    groups: tuple[Group, ...]
    finished: tuple[Group, ...]
    seconds: Mapping[str, float]


@define(eq=False)
class RolloutSource:
    """Gives a trainer its groups, step by step, and learns from it when they were trained on.

    `task_of(ticket)` gives the number of a ticket's environment, and its task. `filters` drop groups that finished; another ticket starts in
    the place of each. Where they dropped more than `max_drop_share` of the 20 batches of tickets before a group, `on_starved` "train" keeps
    that group whatever they say, and "stop" raises RolloutError.
    """

    ledger: RolloutLedger
    runner: RolloutRunner
    task_of: Callable[[int], tuple[int, Task]]
    records: GroupRecords
    filters: Sequence[Part[GroupFilter]] = ()
    max_drop_share: float = 0.9
    on_starved: Literal["train", "stop"] = "train"
    progress: Callable[[int, int], None] | None = None
    _groups: dict[int, Group] = field(factory=dict, init=False)
    _since: list[Group] = field(factory=list, init=False)
    _held: dict[int, Group] = field(factory=dict, init=False)
    _warned: int = field(default=-1, init=False)

    def restart(self) -> None:
        """Start what was under way when a checkpoint was written, under its own tickets."""
        for ticket in list(self.ledger.running):
            self._begin(ticket)

    def take(self, step: int) -> Taken:
        """Wait for the groups of a step, counted from 1. Raises RolloutError where attempts fail, or filters drop too many groups."""
        began = time.monotonic()
        while (tickets := self.ledger.take(step)) is None:
            while self.ledger.may_start():
                self._begin(self.ledger.started())
            self._held |= {group.ticket: group for group in self.runner.advance(_PATIENCE_S)}
            self._decide()
            if self.progress is not None:
                self.progress(len(self.ledger.ready), self.ledger.groups)
        finished, self._since = tuple(sorted(self._since, key=lambda group: group.ticket)), []
        groups = tuple(self._groups.pop(ticket) for ticket in tickets)
        return Taken(groups, finished, {"rollout": time.monotonic() - began})

    def trained(self, groups: Sequence[Group]) -> None:
        """Take the end of the step that trained on these groups."""
        self.ledger.trained(group.ticket for group in groups)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as JSON values."""
        return self.ledger.state()

    def _begin(self, ticket: int) -> None:
        recorded = self.records.find(ticket)
        if recorded is not None and self.ledger.usable(recorded.start_version, _newest(recorded)):
            self._took(recorded)
            return
        environment, task = self.task_of(ticket)
        self.runner.start(ticket, environment, task, self.ledger.version)

    def _decide(self) -> None:
        """Keep or drop groups that have ended, in the order of their tickets; one waits where earlier ones decide if filters count."""
        for ticket in sorted(self._held):
            group = self._held[ticket]
            starved = self.ledger.starved(ticket, self.max_drop_share) if self.filters and group.dropped is None else False
            if starved is None:
                return
            del self._held[ticket]
            reason = group.dropped or self._filtered(group)
            if starved and reason is not None:
                self._refuse_to_starve(ticket, reason)
                reason = None
            if reason is not None:
                group = evolve(group, dropped=reason)
            self.records.append(group)
            self._took(group)

    def _took(self, group: Group) -> None:
        self._since.append(group)
        if group.dropped is None:
            self._groups[group.ticket] = group
            self.ledger.finished(group.ticket, group.start_version)
        else:
            self.ledger.dropped(group.ticket, filtered=group.dropped != "failed")

    def _refuse_to_starve(self, ticket: int, reason: str) -> None:
        share = f"filters dropped more than {self.max_drop_share:.0%} of the last 20 batches of groups"
        if self.on_starved == "stop":
            raise RolloutError(
                f"{share}, and would drop ticket {ticket} as {reason!r}",
                remedy="Choose easier or harder tasks, leave the filter out, or raise rollouts.max_drop_share",
            )
        if self._warned < self.ledger.version:
            self._warned = self.ledger.version
            logger.warning("%s: the next ones are trained on whatever filters say", share)

    def _filtered(self, group: Group) -> str | None:
        """Ask the filters, in their order, for a reason to drop a group."""
        if not self.filters:
            return None
        view = view_of(group, staleness=self.ledger.version - group.start_version)
        for part in self.filters:
            with blaming(part.owner, "its call"):
                reason = part.product(view)
            if reason is not None and (not isinstance(reason, str) or not reason.strip()):
                raise ContractError(
                    f"{part.label} answered {reason!r:.80}", remedy="Return None to keep a group, or a short text to drop it"
                )
            if reason is not None:
                return reason
        return None


def view_of(group: Group, *, staleness: int = 0) -> GroupView:
    """Return what filters see of a group."""
    attempts = group.finished
    return GroupView(
        environment=group.environment,
        rewards=np.array([each.reward for each in attempts], dtype=np.float64),
        success=np.array([bool(each.success) for each in attempts], dtype=np.bool_),
        lengths=np.array([len(each.logprobs) for each in attempts], dtype=np.int64),
        truncated=np.array([each.status == "truncated" for each in attempts], dtype=np.bool_),
        staleness=staleness,
    )


def _newest(group: Group) -> int:
    versions = [int(each.versions.versions.max(initial=group.start_version)) for each in group.trajectories]
    return max(versions, default=group.start_version)
