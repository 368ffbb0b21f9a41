"""Proof P11: whatever happens in whichever order, the ledger trains every group once, in time, and loses nothing that a crash leaves behind.

A machine of Hypothesis plays generator, filter, trainer and crash. It holds what the ledger does not know: which weights sampled every token,
by a name of their own, so that a record of weights that were left behind is seen for what it is. I1 to I9 are the invariants that the
specification of the ledger counts.
"""

import random

import pytest
from attrs import define, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skyrl_engine.rollout.ledger import JournaledGroup, RolloutLedger


@define
class Sampling:
    """A group in the making: version and name of the weights that sampled every piece of it."""

    start: int
    pieces: list[tuple[int, str]]


@define
class Written:
    """A line of the fake journal: a group with its pieces, or that a session went on from a version."""

    ticket: int = -1
    record: JournaledGroup | None = None
    pieces: tuple[tuple[int, str], ...] = ()
    resumed: int | None = None


@define
class Saved:
    """A checkpoint: the ledger's state, the names of its weights, what was trained, and how long the journal was, on the disk."""

    state: dict
    weights: dict[int, str]
    trained: dict[int, int]
    dropped: set[int]
    alive: set[int]
    journal: int


def surviving(journal):
    """The records that count, as skyrl_engine.rollout.journal's index has them."""
    found = {}
    for line in journal:
        if line.resumed is None:
            found[line.ticket] = line
        else:
            found = {ticket: each for ticket, each in found.items() if each.record.newest_version <= line.resumed}
    return found


@define(eq=False)
class World:
    """A run around a ledger, without a clock."""

    ledger: RolloutLedger
    in_flight: bool
    running: dict[int, Sampling] = field(factory=dict)
    finished: dict[int, tuple[tuple[int, str], ...]] = field(factory=dict)
    weights: dict[int, str] = field(factory=lambda: {0: "0"})
    journal: list[Written] = field(factory=list)
    trained: dict[int, int] = field(factory=dict)
    dropped: set[int] = field(factory=set)
    order: list[int] = field(factory=list)
    saved: Saved | None = None
    names: int = 0
    events: int = 0
    unpublished: bool = False

    def __attrs_post_init__(self):
        self.save()

    def start(self, at_most=None):
        """Start what may start; I3 and I8 hold afterwards."""
        ledger = self.ledger
        room = ledger.may_start()
        before = len(self.living())
        started = ledger.start_tickets(at_most)
        self.events += len(started)
        self.take_up_recalled()
        for ticket in started:
            assert ticket not in self.trained
            assert ticket not in self.dropped
            assert ticket not in self.running
            self.running[ticket] = Sampling(ledger.version, [(ledger.version, self.weights[ledger.version])])
        bound = (ledger.version - ledger.step + ledger.staleness + 1) * ledger.groups
        assert len(started) <= room
        assert len(self.living()) <= max(bound, before), "I3"
        assert ledger.concurrency is None or len(self.running) <= ledger.concurrency, "I8"

    def take_up_recalled(self):
        """Look up what the ledger took from the journal without sampling."""
        found = surviving(self.journal)
        for ticket in self.ledger.ready():
            if ticket not in self.finished:
                self.finished[ticket] = found[ticket].pieces
        for ticket, line in found.items():
            if self.ledger.state_of(ticket) == "done" and ticket not in self.trained and ticket not in self.dropped:
                assert line.record.failed or line.record.dropped, "I6: a finished group was dropped by a resume"
                self.dropped.add(ticket)

    def finish(self, ticket, fate):
        sampling = self.running.pop(ticket)
        newest = max(version for version, _ in sampling.pieces)
        record = JournaledGroup(sampling.start, newest, "of no use" if fate == "dropped" else None, failed=fate == "failed")
        self.journal.append(Written(ticket, record, tuple(sampling.pieces)))
        self.events += 1
        if fate == "failed":
            self.ledger.fail_group(ticket)
        elif fate == "dropped":
            self.ledger.drop_group(ticket, "of no use")
        else:
            self.ledger.finish_group(ticket)
        self.finished[ticket] = tuple(sampling.pieces)
        self.take_up_recalled()
        self.sweep()

    def sweep(self):
        """Forget groups that the ledger let go of."""
        for ticket in list(self.finished):
            if self.ledger.state_of(ticket) == "done":
                del self.finished[ticket]
                self.dropped.add(ticket)

    def train(self):
        ledger = self.ledger
        step = ledger.step + 1
        tickets = ledger.next_batch(step)
        assert tickets is not None
        for ticket in tickets:
            start = ledger.start_version(ticket)
            assert step - 1 - start <= ledger.staleness, "I4"
            assert ticket not in self.trained, "I2"
            assert ticket not in self.dropped, "I6"
            for version, name in self.finished[ticket]:
                assert self.weights.get(version) == name, "a token of weights that were left behind"
        if ledger.staleness == 0 or ledger.order == "ticket":
            assert list(tickets) == sorted(tickets)
            assert all(ticket > max(self.order, default=-1) for ticket in tickets), "I7"
        ledger.finish_step(step, tickets)
        self.events += 1
        for ticket in tickets:
            del self.finished[ticket]
            self.trained[ticket] = step
            self.order.append(ticket)
        self.names += 1
        self.weights[step] = f"{step}:{self.names}"
        self.unpublished = True

    def publish(self):
        version = self.ledger.step
        self.ledger.publish(version)
        self.events += 1
        if self.in_flight:
            for sampling in self.running.values():
                sampling.pieces.append((version, self.weights[version]))
        self.unpublished = False

    def save(self):
        ledger = self.ledger
        self.saved = Saved(
            ledger.state(),
            {version: name for version, name in self.weights.items() if version <= ledger.step},
            dict(self.trained),
            set(self.dropped),
            set(self.living()),
            len(self.journal),
        )

    def crash(self, kept):
        """Go on from the checkpoint, with the first `kept` lines of the journal: at least those that were on the disk before it."""
        saved = self.saved
        self.journal = self.journal[:kept]
        version = saved.state["step"]
        found = surviving([*self.journal, Written(resumed=version)])
        self.journal.append(Written(resumed=version))
        self.running, self.finished = {}, {}
        self.weights, self.trained, self.dropped = dict(saved.weights), dict(saved.trained), set(saved.dropped)
        self.order = sorted(saved.trained, key=lambda ticket: (saved.trained[ticket], ticket))
        recorded = {ticket: line.record for ticket, line in found.items()}
        self.ledger = RolloutLedger.from_state(saved.state, self.ledger, recorded)
        self.unpublished = False
        self.take_up_recalled()
        self.sweep()
        for ticket in saved.alive:
            usable = ticket in found and found[ticket].record.start_version >= version - self.ledger.staleness
            if usable:
                assert self.ledger.state_of(ticket) != "waiting", f"I5: ticket {ticket} is sampled again"
            else:
                assert self.ledger.state_of(ticket) == "waiting"

    def living(self):
        return {*self.running, *self.finished}

    def check(self):
        """I1: every ticket has one state, and the ledger's is the world's."""
        ledger = self.ledger
        assert set(ledger.running()) == set(self.running)
        for ticket in self.living():
            expected = "running" if ticket in self.running else ("ready", "undecided")
            assert ledger.state_of(ticket) in expected
        for ticket in [*self.trained, *self.dropped]:
            assert ledger.state_of(ticket) == "done"
        assert not {*self.trained} & self.dropped, "I6"
        assert len(self.trained) == ledger.step * ledger.groups
        for version in range(ledger.version + 1):
            old = sum(1 for ticket in self.living() if ledger.start_version(ticket) <= version)
            assert old <= max(0, version - ledger.step + ledger.staleness + 1) * ledger.groups or ledger.order == "ticket"

    def stuck(self):
        """I9: something can always happen."""
        return not (self.running or self.ledger.may_start() or self.ledger.next_batch(self.ledger.step + 1) or self.unpublished)


@st.composite
def rules(draw):
    groups, staleness = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    return RolloutLedger(
        groups=groups,
        staleness=staleness,
        order=draw(st.sampled_from(["finished", "ticket"])),
        concurrency=draw(st.none() | st.integers(1, 4 * groups * (staleness + 1))),
        max_drop_share=draw(st.sampled_from([1.0, 1.0, 0.9, 0.2])),
    )


class LedgerMachine(RuleBasedStateMachine):
    """Every order of events that Hypothesis can think of."""

    @initialize(ledger=rules(), in_flight=st.booleans())
    def begin(self, ledger, in_flight):
        self.world = World(ledger, in_flight)

    @precondition(lambda self: self.world.ledger.may_start())
    @rule(at_most=st.none() | st.integers(1, 3))
    def start(self, at_most):
        self.world.start(at_most)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), fate=st.sampled_from(["finished", "finished", "dropped", "failed"]))
    def finish(self, data, fate):
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.running))), fate)

    @precondition(lambda self: not self.world.unpublished and self.world.ledger.next_batch(self.world.ledger.step + 1) is not None)
    @rule()
    def train(self):
        self.world.train()

    @precondition(lambda self: self.world.unpublished)
    @rule()
    def publish(self):
        self.world.publish()

    @rule()
    def save(self):
        self.world.save()

    @rule(data=st.data())
    def crash(self, data):
        self.world.crash(data.draw(st.integers(self.world.saved.journal, len(self.world.journal))))

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()
            assert not self.world.stuck(), "I9"


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


class NightlyMachine(LedgerMachine):
    """The same, for longer."""


NightlyMachine.TestCase.settings = settings(max_examples=1500, stateful_step_count=120, deadline=None)
TestLedgerLong = pytest.mark.nightly(NightlyMachine.TestCase)


def play(seed, steps):
    """One random run of `steps` steps, with late groups, drops of up to 60 % and up to four crashes; returns the world."""
    draw = random.Random(seed)
    groups, staleness = draw.randint(1, 5), draw.randint(0, 3)
    ledger = RolloutLedger(
        groups=groups,
        staleness=staleness,
        order=draw.choice(["finished", "ticket"]),
        concurrency=draw.choice([None, draw.randint(1, 4 * groups * (staleness + 1))]),
        max_drop_share=draw.choice([1.0, 0.9, 0.3]),
    )
    world = World(ledger, in_flight=draw.random() < 0.5)
    drops, crashes = draw.choice([0.0, 0.2, 0.6]), 0
    while world.ledger.step < steps:
        assert world.events < 20_000, "I9: no progress"
        acts = [world.publish] if world.unpublished else []
        if world.ledger.may_start():
            acts.append(world.start)
        if world.running:
            tickets = sorted(world.running)
            late = draw.choice(tickets[1:] or tickets) if draw.random() < 0.3 else draw.choice(tickets)
            fate = draw.choice(["dropped", "failed"]) if draw.random() < drops else "finished"
            acts.append(lambda ticket=late, fate=fate: world.finish(ticket, fate))
        if not world.unpublished and world.ledger.next_batch(world.ledger.step + 1) is not None:
            acts.append(world.train)
        assert acts, "I9: a deadlock"
        if draw.random() < 0.004 and crashes < 4:
            crashes += 1
            world.crash(draw.randint(world.saved.journal, len(world.journal)))
        else:
            draw.choice(acts)()
        if draw.random() < 0.05:
            world.save()
        world.check()
    return world


def test_twenty_thousand_events():
    """Runs of 12 steps, one after another."""
    events = seed = 0
    while events < 20_000:
        events += play(seed, steps=12).events
        seed += 1
    assert seed > 20


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 5000, 1000))
def test_more_random_runs(first):
    for seed in range(first, first + 1000):
        play(seed, steps=12)
