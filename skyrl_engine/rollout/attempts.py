"""Attempts of a journal by steps, rewards and statuses: summed up and chosen by what the records say of them, before any rows are read."""

from array import array
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.rollout.journal_index import JournalIndex

Order = Literal["best", "worst"]

_SLACK = 16_384
"""Attempts that a shortlist takes beyond those that it keeps, before it sorts them."""


@define(eq=False)
class GroupSteps:
    """The step of every group of a journal: the one that trained on it, or that it was sampled for. Made by `read_steps`."""

    tickets: IntArray
    """int64: in the order of the journal's groups."""
    steps: IntArray
    """int64: one for each."""
    trained: dict[int, int]
    """The step that trained on a ticket, by ticket."""

    def list_tickets_by_step(self) -> Iterator[tuple[int, list[int]]]:
        """Yield every step, in order, with its tickets in the order of the journal."""
        order = np.argsort(self.steps, kind="stable")
        tickets, steps = self.tickets[order], self.steps[order]
        bounds = np.flatnonzero(np.diff(steps)) + 1
        if len(steps):
            for begin, end in pairwise([0, *bounds.tolist(), len(steps)]):
                yield int(steps[begin]), tickets[begin:end].tolist()

    def list_groups(self, steps: Collection[int] | None = None) -> Iterator[tuple[int, int]]:
        """Yield step and ticket of every group, of some steps alone or of all, in their order."""
        order = np.lexsort((self.tickets, self.steps))
        if steps is not None:
            order = order[np.isin(self.steps[order], list(steps))]
        # numbers of Python for a few groups at a time
        for begin in range(0, len(order), _SLACK):
            part = order[begin : begin + _SLACK]
            yield from zip(self.steps[part].tolist(), self.tickets[part].tolist(), strict=True)


def read_steps(index: JournalIndex) -> GroupSteps:
    """Return the steps of the groups of a journal."""
    trained, count = index.steps(), len(index.groups)
    steps = (trained[ticket] if ticket in trained else entry.start_version + 1 for ticket, entry in index.groups.items())
    return GroupSteps(np.fromiter(index.groups, np.int64, count), np.fromiter(steps, np.int64, count), trained)


def summarize_steps(index: JournalIndex) -> Iterator[dict[str, Any]]:
    """Yield what there is to say of every step: its groups, its attempts and their rewards."""
    of_groups = read_steps(index)
    for step, tickets in of_groups.list_tickets_by_step():
        entries = [index.groups[ticket] for ticket in tickets]
        statuses = [status for entry in entries for status in entry.statuses]
        rewards = [
            reward for entry in entries for reward, status in zip(entry.rewards, entry.statuses, strict=True) if status != "failed"
        ]
        yield {
            "step": step,
            "groups": sum(ticket in of_groups.trained for ticket in tickets),
            "dropped": sum(
                ticket not in of_groups.trained and entry.dropped is not None
                for ticket, entry in zip(tickets, entries, strict=True)
            ),
            "attempts": len(statuses),
            "failed": statuses.count("failed"),
            "truncated": statuses.count("truncated"),
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "lowest": min(rewards, default=None),
            "highest": max(rewards, default=None),
        }


@frozen
class Wanted:
    """Conditions on attempts, and their order by reward; None: by step and ticket. `fits` is asked for the tokens of an attempt."""

    order: Order | None = None
    truncated: bool = False
    failed: bool = False
    fits: Callable[[npt.NDArray[np.int32]], bool] | None = None

    def accept_status(self, status: str) -> bool:
        """Say if attempts with a status are wanted. In an order by reward failed ones are only where they are asked for."""
        if status == "failed":
            return not self.truncated and (self.failed or self.order is None)
        return not self.failed and (not self.truncated or status == "truncated")


@define(eq=False)
class Shortlist:
    """The first `limit` attempts in an order, of any number that are added; those before others with the same reward stay before them."""

    order: Order | None
    limit: int
    count: int = 0
    """Attempts that were added."""
    _rewards: "array[float]" = field(factory=lambda: array("d"), init=False)
    _tickets: "array[int]" = field(factory=lambda: array("q"), init=False)
    _places: "array[int]" = field(factory=lambda: array("q"), init=False)

    def add(self, reward: float, ticket: int, place: int) -> None:
        """Take the next attempt: its reward, the ticket of its group and its place there."""
        self.count += 1
        if self.order is None and len(self._tickets) == self.limit:
            return
        self._rewards.append(reward)
        self._tickets.append(ticket)
        self._places.append(place)
        if len(self._tickets) >= self.limit + _SLACK and self.order is not None:
            self._cut()

    def list_attempts(self) -> Iterator[tuple[int, int]]:
        """Yield ticket and place of those that are left, in their order."""
        if self.order is not None:
            self._cut()
        yield from zip(self._tickets, self._places, strict=True)

    def _cut(self) -> None:
        rewards = np.frombuffer(self._rewards, dtype=np.float64)
        kept = np.argsort(-rewards if self.order == "best" else rewards, kind="stable")[: self.limit]
        self._rewards = array("d", rewards[kept].tobytes())
        self._tickets, self._places = (
            array("q", np.frombuffer(column, dtype=np.int64)[kept].tobytes()) for column in (self._tickets, self._places)
        )


def choose_attempts(
    index: JournalIndex, groups: GroupSteps, wanted: Wanted, limit: int, steps: Collection[int] | None = None
) -> Shortlist:
    """Choose attempts of some steps or of all. Tokens are read where `wanted` asks for them, of one group at a time; no other rows are."""
    chosen = Shortlist(wanted.order, limit)
    for _, ticket in groups.list_groups(steps):
        entry = index.groups[ticket]
        candidates = [place for place, status in enumerate(entry.statuses) if wanted.accept_status(status)]
        if candidates and wanted.fits is not None:
            tokens = entry.read_tokens()
            candidates = [place for place in candidates if wanted.fits(tokens[place])]
        rewards = entry.rewards if candidates else ()
        for place in candidates:
            chosen.add(rewards[place], ticket, place)
    return chosen
