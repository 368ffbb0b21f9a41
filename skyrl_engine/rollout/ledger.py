"""The ledger of groups: which ticket may start, what a step may train on, and what is left out. It knows no clock, thread, model or file.

A *ticket* is the ordinal of a group in the run. Of every ticket the ledger knows one state, and events move it on:

    waiting ──started──► running ──finished──► ready ──trained──► done
                            ├──────dropped──► undecided ──► done, or ready where too much was dropped
                            └──────failed───► done

B groups are trained per step, and step t trains version t - 1 of the weights into version t. Two rules keep every trained group at most S
versions behind:

- *Start*: a ticket may start while running, undecided and ready groups are fewer than (v + S + 1) B less those of the steps done, with v the
  version that the sampler has. Dropped groups leave these, so that others take their place.
- *Take*: with untrained(x) the groups started at version x or before that are not trained, step t may take B ready groups where afterwards
  untrained(t - 1 - S + j) <= j B for every j of 0..S.

Start gives untrained(t - 1) <= (S + 1) B, and taking the oldest B keeps the rest in order, so that nothing gets too old, nothing is thrown away
for its age and nothing waits forever.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from attrs import define, evolve, field, frozen
from attrs.validators import and_, ge, in_, le, optional

from skyrl_engine.errors import RolloutError

Order = Literal["finished", "ticket"]
OnStarved = Literal["train", "stop"]
TicketState = Literal["waiting", "running", "undecided", "ready", "done"]

WINDOW_STEPS: Final = 20
"""Steps whose tickets are counted for the share of dropped groups."""


@frozen
class JournaledGroup:
    """The facts about a group in the journal that decide whether a run that goes on may use it.

    `newest_version` is that of its youngest token. `dropped` is the reason of a filter, `failed` says that too few attempts are left.
    """

    start_version: int
    newest_version: int
    dropped: str | None = None
    failed: bool = False


@define
class RolloutLedger:
    """The states of all tickets of a run of `groups` groups (B) per step, at most `staleness` (S) versions behind.

    `steps` counts all of the run (None: nobody says): no group starts that none of them can train on. `order` "finished" trains what is ready
    by (start version, ticket), "ticket" the lowest tickets that are not done, which is how it is with staleness 0. `concurrency` bounds
    running groups (None: no bound). Filters drop at most `max_drop_share` of the last 20 B tickets: what they would drop beyond is kept, or
    ends the run, as `on_starved` says. In the order of tickets that is decided in their order too, so that it is the same whatever finishes
    first.
    """

    groups: int = field(validator=ge(1))
    staleness: int = field(default=0, validator=ge(0))
    order: Order = field(default="finished", validator=in_(("finished", "ticket")))
    concurrency: int | None = field(default=None, validator=optional(ge(1)))
    steps: int | None = field(default=None, validator=optional(ge(1)))
    max_drop_share: float = field(default=1.0, validator=and_(ge(0.0), le(1.0)))
    on_starved: OnStarved = field(default="train", validator=in_(("train", "stop")))

    step: int = field(default=0, init=False)
    """Steps that were trained."""
    version: int = field(default=0, init=False)
    """Version of the weights that the sampler has."""
    kept: int = field(default=0, init=False)
    """Groups that a filter would have dropped and that were kept, because too much was dropped."""

    _next: int = field(default=0, init=False)
    _waiting: list[int] = field(factory=list, init=False)
    _started: dict[int, int] = field(factory=dict, init=False)
    _running: set[int] = field(factory=set, init=False)
    _undecided: dict[int, str] = field(factory=dict, init=False)
    _ready: dict[int, list[int]] = field(factory=dict, init=False)
    _ready_count: int = field(default=0, init=False)
    _of_version: dict[int, int] = field(factory=dict, init=False)
    _alive: list[int] = field(factory=list, init=False)
    _open: list[int] = field(factory=list, init=False)
    _drops: list[int] = field(factory=list, init=False)
    _recorded: dict[int, JournaledGroup] = field(factory=dict, init=False, repr=False)
    _recalled: list[int] = field(factory=list, init=False, repr=False)

    # --- queries -------------------------------------------------------------------------------------------------------------------

    def may_start(self) -> int:
        """Count the tickets that may start now."""
        room = (self.version - self.step + self.staleness + 1) * self.groups - len(self._started)
        if self.steps is not None:
            room = min(room, (self.steps - self.step) * self.groups - len(self._started))
        if self.concurrency is not None:
            room = min(room, self.concurrency - len(self._running))
        return max(room, 0)

    def next_batch(self, step: int) -> tuple[int, ...] | None:
        """Return the tickets that `step` trains on, in the order of tickets; None while it must wait. It changes nothing."""
        assert step == self.step + 1, f"step {step} after step {self.step}"
        if self._ready_count < self.groups:
            return None
        if self.in_order:
            return self._select_lowest()
        chosen = self._select_oldest()
        remaining = dict(self._of_version)
        for ticket in chosen:
            remaining[self._started[ticket]] -= 1
        fits = all(
            sum(count for version, count in remaining.items() if version <= step - 1 - self.staleness + j) <= j * self.groups
            for j in range(self.staleness + 1)
        )
        return tuple(sorted(chosen)) if fits else None

    @property
    def in_order(self) -> bool:
        """Say whether tickets are trained in their order."""
        return self.order == "ticket" or self.staleness == 0

    def running(self) -> tuple[int, ...]:
        """Return the tickets that are being sampled."""
        return tuple(sorted(self._running))

    def ready(self) -> tuple[int, ...]:
        """Return the tickets that may be trained on."""
        return tuple(sorted(heapq.merge(*self._ready.values())))

    def start_version(self, ticket: int) -> int:
        """Return the version of the weights that a living ticket was started with."""
        return self._started[ticket]

    def state_of(self, ticket: int) -> TicketState:
        """Return the state of a ticket; "done" is trained, dropped or failed."""
        if ticket in self._running:
            return "running"
        if ticket in self._undecided:
            return "undecided"
        if ticket in self._started:
            return "ready"
        return "waiting" if ticket >= self._next or ticket in self._waiting else "done"

    # --- events --------------------------------------------------------------------------------------------------------------------

    def start_tickets(self, at_most: int | None = None) -> tuple[int, ...]:
        """Start the tickets that may start, the lowest first, and return those to sample, `at_most` so many.

        Of the others the journal holds attempts that can be used: they are ready, or dropped, at once.
        """
        chosen: list[int] = []
        while self.may_start() and (at_most is None or len(chosen) < at_most):
            if self._waiting:
                ticket = self._waiting.pop(0)
            else:
                ticket, self._next = self._next, self._next + 1
                self._enter(ticket)
            journaled = self._recorded.pop(ticket, None)
            if journaled is None or not self._recall(ticket, journaled):
                self._begin(ticket, self.version)
                chosen.append(ticket)
        return tuple(chosen)

    def finish_group(self, ticket: int) -> None:
        """Take a running group as one to train on."""
        self._end(ticket)
        self._make_ready(ticket)
        self._decide()

    def drop_group(self, ticket: int, reason: str) -> bool | None:
        """Take a running group as one that a filter wants to drop.

        Returns True where it is dropped, False where it is kept because too much was dropped, and None where that depends on earlier tickets
        that are still running. Raises RolloutError where too much was dropped and `on_starved` is "stop".
        """
        assert reason, "a group is dropped for no reason"
        self._end(ticket)
        self._undecided[ticket] = reason
        self._decide()
        state = self.state_of(ticket)
        return None if state == "undecided" else state == "done"

    def fail_group(self, ticket: int) -> None:
        """Take a running group as one of which too little is left to train on; filters have no share in that."""
        self._end(ticket)
        self._leave(ticket)
        self._close(ticket)
        self._decide()

    def finish_step(self, step: int, tickets: Sequence[int]) -> None:
        """Count a step that trained on `tickets`, as `next_batch` gave them."""
        assert step == self.step + 1, f"step {step} after step {self.step}"
        assert len(set(tickets)) == self.groups, f"{len(set(tickets))} groups for a step of {self.groups}"
        for ticket in tickets:
            assert self.state_of(ticket) == "ready", f"ticket {ticket} is {self.state_of(ticket)}"
            of_version = self._ready[self._started[ticket]]
            del of_version[bisect_left(of_version, ticket)]
            self._ready_count -= 1
            self._leave(ticket)
        self.step = step

    def publish(self, version: int) -> None:
        """Count the weights of `version` as the sampler's: tickets that start from now on start with them."""
        assert self.version <= version <= self.step, f"version {version} after {self.version}, with {self.step} steps trained"
        self.version = version

    # --- resume --------------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain JSON values: what was trained follows from the next ticket and those alive."""
        lowest = min([self._next, *self._open[:1]]) - WINDOW_STEPS * self.groups
        return {
            "step": self.step,
            "version": self.version,
            "next": self._next,
            "alive": list(self._alive),
            "drops": [ticket for ticket in self._drops if ticket >= lowest],
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], rules: "RolloutLedger", recorded: Mapping[int, JournaledGroup] | None = None
    ) -> "RolloutLedger":
        """Return a ledger that goes on from the `state` of a checkpoint, under the rules of another ledger.

        Tickets that were alive start again. `recorded` says what the journal holds: a record is used where all of its tokens are of weights
        that came before the checkpoint, and it is not too old for the step in which its turn comes; else the ticket is sampled again. The
        sampler is taken to hold the weights of the checkpoint.
        """
        ledger = evolve(rules)
        ledger._restore(state, recorded or {})  # noqa: SLF001 - its own class
        return ledger

    def pop_recalled(self) -> tuple[int, ...]:
        """Return the tickets that were taken as their record says, since this was asked before."""
        tickets, self._recalled = tuple(self._recalled), []
        return tickets

    def _restore(self, state: Mapping[str, Any], recorded: Mapping[int, JournaledGroup]) -> None:
        self.step = self.version = int(state["step"])
        self._next = int(state["next"])
        self._drops = [int(ticket) for ticket in state["drops"]]
        alive = sorted(int(ticket) for ticket in state["alive"])
        for ticket in alive:
            self._enter(ticket)
        usable = {ticket: journaled for ticket, journaled in recorded.items() if journaled.newest_version <= self.step}
        self._recorded = {ticket: journaled for ticket, journaled in usable.items() if ticket >= self._next}
        self._waiting = list(alive)
        for ticket in alive:
            if ticket in usable:
                self._waiting.remove(ticket)
                if not self._recall(ticket, usable[ticket]):
                    insort(self._waiting, ticket)

    def _recall(self, ticket: int, journaled: JournaledGroup) -> bool:
        """Take a ticket as its record says, where it can be used."""
        if not self.step - self.staleness <= journaled.start_version <= self.version:
            return False
        leaves = journaled.failed or (journaled.dropped is not None and not self._may_starve(ticket))
        if not (leaves or self._in_time(ticket, journaled.start_version)):
            return False
        self._begin(ticket, journaled.start_version)
        self._recalled.append(ticket)
        if journaled.failed:
            self.fail_group(ticket)
        elif journaled.dropped is not None:
            self.drop_group(ticket, journaled.dropped)
        else:
            self.finish_group(ticket)
        return True

    def _in_time(self, ticket: int, start: int) -> bool:
        """Say whether a group started at version `start` is certain to be trained within S versions of it."""
        if self.in_order:
            ahead = bisect_left(self._alive, ticket)
            return self.step + ahead // self.groups - start <= self.staleness
        return all(
            sum(count for version, count in self._of_version.items() if version <= edge) < (j + 1) * self.groups
            for j in range(self.staleness + 1)
            if start <= (edge := self.step - self.staleness + j)
        )

    # --- what the states rest on ---------------------------------------------------------------------------------------------------

    def _enter(self, ticket: int) -> None:
        """Take up a ticket: it is neither trained nor dropped."""
        insort(self._alive, ticket)
        insort(self._open, ticket)

    def _begin(self, ticket: int, version: int) -> None:
        self._started[ticket] = version
        self._of_version[version] = self._of_version.get(version, 0) + 1
        self._running.add(ticket)

    def _end(self, ticket: int) -> None:
        assert ticket in self._running, f"ticket {ticket} is {self.state_of(ticket)}, not running"
        self._running.remove(ticket)

    def _leave(self, ticket: int) -> None:
        """Let go of a ticket: it is trained, dropped or failed."""
        version = self._started.pop(ticket)
        self._of_version[version] -= 1
        if not self._of_version[version]:
            del self._of_version[version]
            self._ready.pop(version, None)
        del self._alive[bisect_left(self._alive, ticket)]

    def _close(self, ticket: int) -> None:
        """Take a ticket's fate as known."""
        del self._open[bisect_left(self._open, ticket)]

    def _make_ready(self, ticket: int) -> None:
        insort(self._ready.setdefault(self._started[ticket], []), ticket)
        self._ready_count += 1
        self._close(ticket)

    def _select_lowest(self) -> tuple[int, ...] | None:
        lowest = self._alive[: self.groups]
        ready = all(ticket in self._started and ticket not in self._running and ticket not in self._undecided for ticket in lowest)
        return tuple(lowest) if ready and len(lowest) == self.groups else None

    def _select_oldest(self) -> list[int]:
        chosen: list[int] = []
        for version in sorted(self._ready):
            chosen += self._ready[version][: self.groups - len(chosen)]
        return chosen

    # --- filters -------------------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Drop or keep the undecided groups whose fate is known by now, the lowest first."""
        for ticket in sorted(self._undecided):
            if not self._may_starve(ticket):
                del self._undecided[ticket]
                self._close(ticket)
                self._leave(ticket)
                insort(self._drops, ticket)
            elif self._must_starve(ticket):
                self._starve(ticket)
            # else: earlier tickets decide, whose fate is not known
        del self._drops[: bisect_left(self._drops, (self._open[0] if self._open else self._next) - WINDOW_STEPS * self.groups)]

    def _may_starve(self, ticket: int) -> bool:
        """Say whether one more dropped group can be too many, whatever becomes of the tickets before it."""
        unknown = _count(self._open, self._window(ticket), ticket) if self.in_order else 0
        return self._drops_with(ticket) + unknown > self._most and ticket + 1 >= WINDOW_STEPS * self.groups

    def _must_starve(self, ticket: int) -> bool:
        """Say whether one more dropped group is too many already."""
        return self._drops_with(ticket) > self._most and ticket + 1 >= WINDOW_STEPS * self.groups

    def _drops_with(self, ticket: int) -> int:
        return _count(self._drops, self._window(ticket), ticket) + 1

    def _window(self, ticket: int) -> int:
        return max(ticket + 1 - WINDOW_STEPS * self.groups, 0)

    @property
    def _most(self) -> float:
        return self.max_drop_share * WINDOW_STEPS * self.groups

    def _starve(self, ticket: int) -> None:
        """Keep a group although a filter would drop it. Raises RolloutError where that ends the run."""
        reason = self._undecided.pop(ticket)
        if self.on_starved == "stop":
            raise RolloutError(
                f"filters dropped more than {self.max_drop_share:.0%} of the last {WINDOW_STEPS * self.groups} groups "
                f"(group {ticket}: {reason})",
                remedy='Choose tasks that the model solves now and then, or set rollouts.on_starved = "train" to train on what they drop',
            )
        self.kept += 1
        self._make_ready(ticket)


def _count(tickets: Sequence[int], first: int, end: int) -> int:
    """Count the sorted tickets from `first` up to, not including, `end`."""
    return bisect_left(tickets, end) - bisect_left(tickets, first)
