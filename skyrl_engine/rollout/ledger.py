"""`RolloutLedger`: which group may start, is trained on, is dropped. A pure state machine: no clock, no thread, no randomness.

Version v is the number of steps that are done; step t (from 1) trains B groups with weights of version t - 1. A group that started at version s
and is trained in step t has the staleness t - 1 - s, and no group has more than S.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from attrs import define, field

Order = Literal["finished", "ticket"]


@define(eq=False)
class RolloutLedger:
    """Tickets 0, 1, ... of a run that trains `groups` of them per step, with a staleness of at most `staleness` steps.

    At most `concurrency` groups run at once. `order` "ticket" trains the lowest tickets that are not dropped, "finished" those that
    finished, the oldest first.
    """

    groups: int
    staleness: int = 0
    concurrency: int = 2**31
    order: Order = "ticket"
    version: int = field(default=0, init=False)
    next_ticket: int = field(default=0, init=False)
    trained_count: int = field(default=0, init=False)
    _running: dict[int, int] = field(factory=dict, init=False)
    _ready: dict[int, int] = field(factory=dict, init=False)
    _filtered: set[int] = field(factory=set, init=False)

    @property
    def running(self) -> Mapping[int, int]:
        """Tickets under way, with the version each started at."""
        return self._running

    @property
    def ready(self) -> Mapping[int, int]:
        """Tickets that wait to be trained on, with the version each started at."""
        return self._ready

    def starved(self, ticket: int, share: float) -> bool | None:
        """Say whether filters dropped more than `share` of the 20 batches of tickets before this one; None while that is not decided yet.

        It depends on tickets alone, and not on the order in which groups finish.
        """
        window = 20 * self.groups
        before = range(ticket - window, ticket)
        dropped = sum(each in before for each in self._filtered)
        if dropped > share * window:
            return True
        undecided = sum(each in before for each in self._running)
        return False if dropped + undecided <= share * window else None

    def may_start(self) -> int:
        """Count the groups that may start now: alive ones stay below (version + staleness + 1) batches."""
        alive = self.trained_count + len(self._ready) + len(self._running)
        room = (self.version + self.staleness + 1) * self.groups - alive
        return max(0, min(room, self.concurrency - len(self._running)))

    def started(self) -> int:
        """Start the next ticket, at the present version, and return it."""
        assert self.may_start() > 0, "a group was started that may not"
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self._running[ticket] = self.version
        return ticket

    def finished(self, ticket: int, start_version: int | None = None) -> None:
        """Take a group that finished; `start_version` where it is an older one, out of a journal."""
        started = self._running.pop(ticket)
        self._ready[ticket] = started if start_version is None else start_version

    def dropped(self, ticket: int, *, filtered: bool = True) -> None:
        """Take a group that is not trained on, because a filter dropped it or its attempts failed; another one may start in its place."""
        self._running.pop(ticket)
        if filtered:
            self._filtered = {each for each in self._filtered if each >= ticket - 20 * self.groups} | {ticket}

    def take(self, step: int) -> tuple[int, ...] | None:
        """Return the tickets that `step` trains on, in ascending order; None while it has to wait.

        Groups may be taken where afterwards no more groups become due in any of the coming steps than fit into them: then every group is
        trained on in time, and none waits for another that cannot come.
        """
        assert step == self.version + 1, "steps follow each other"
        if self.order == "ticket":
            alive = sorted([*self._running, *self._ready])[: self.groups]
            return tuple(alive) if len(alive) == self.groups and all(each in self._ready for each in alive) else None
        chosen = sorted(self._ready, key=lambda each: (self._ready[each], each))[: self.groups]
        if len(chosen) < self.groups:
            return None
        left = [*self._running.values(), *(version for each, version in self._ready.items() if each not in chosen)]
        due = step - 1 - self.staleness
        fits = all(sum(version <= due + later for version in left) <= later * self.groups for later in range(self.staleness + 1))
        return tuple(sorted(chosen)) if fits else None

    def trained(self, tickets: Iterable[int]) -> None:
        """Take the end of a step on these tickets: weights of the next version are made."""
        for ticket in tickets:
            started = self._ready.pop(ticket)
            assert self.version - started <= self.staleness, "a group was trained on that is too old"
            self.trained_count += 1
        self.version += 1

    def usable(self, start_version: int, newest_token: int) -> bool:
        """Say whether a group out of a journal may stand for a ticket that starts now: made by weights that are not lost, and not too old."""
        return newest_token <= self.version and self.version - self.staleness <= start_version <= self.version

    def state(self) -> dict[str, Any]:
        """Return the ledger as JSON values. Groups under way and ready start again when it is restored, or are found in the journal."""
        return {
            "version": self.version,
            "next_ticket": self.next_ticket,
            "trained": self.trained_count,
            "alive": sorted([*self._running, *self._ready]),
            "filtered": sorted(self._filtered),
        }

    def restored(self, state: Mapping[str, Any]) -> Self:
        """Take a saved state; returns itself. Alive tickets run again from the version of the state on."""
        self.version, self.next_ticket = int(state["version"]), int(state["next_ticket"])
        self.trained_count = int(state["trained"])
        self._ready.clear()
        self._running = {int(ticket): self.version for ticket in state["alive"]}
        self._filtered = {int(ticket) for ticket in state["filtered"]}
        return self
