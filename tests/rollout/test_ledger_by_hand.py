"""The ledger by hand: which group starts, is replaced, is too old, and what it does where filters drop too much."""

import json
import random

import pytest

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.ledger import WINDOW_STEPS, JournaledGroup, RolloutLedger


def test_a_synchronous_run_starts_a_batch_and_waits_for_all_of_it():
    ledger = RolloutLedger(groups=2)
    assert ledger.may_start() == 2
    assert ledger.start_tickets() == (0, 1)
    assert ledger.start_tickets() == ()
    ledger.finish_group(1)
    assert ledger.next_batch(1) is None
    ledger.finish_group(0)
    assert ledger.next_batch(1) == (0, 1)
    ledger.finish_step(1, (0, 1))
    assert ledger.may_start() == 0, "the sampler has the old weights"
    ledger.publish(1)
    assert ledger.start_tickets() == (2, 3)


def test_a_dropped_group_is_replaced_at_once():
    ledger = RolloutLedger(groups=2)
    ledger.start_tickets()
    assert ledger.drop_group(0, "zero variance") is True
    assert ledger.start_tickets() == (2,)
    ledger.fail_group(1)
    assert ledger.start_tickets() == (3,)
    ledger.finish_group(3)
    ledger.finish_group(2)
    assert ledger.next_batch(1) == (2, 3)


def test_one_step_of_staleness_lets_the_next_batch_start_and_no_more():
    ledger = RolloutLedger(groups=2, staleness=1)
    assert ledger.start_tickets() == (0, 1, 2, 3)
    ledger.finish_group(3)
    ledger.finish_group(2)
    assert ledger.next_batch(1) == (2, 3), "the rest is due in the step after"
    ledger.finish_step(1, (2, 3))
    ledger.publish(1)
    assert ledger.start_tickets() == (4, 5)
    ledger.finish_group(4)
    ledger.finish_group(5)
    assert ledger.next_batch(2) is None, "0 and 1 are due now"
    ledger.finish_group(0)
    ledger.finish_group(1)
    assert ledger.next_batch(2) == (0, 1)


def test_more_than_a_batch_must_not_become_due_at_once():
    """The rule that waits for due groups alone fails here: it would take 2 young ones and leave 3 old ones for a step of 2."""
    ledger = RolloutLedger(groups=2, staleness=2)
    assert ledger.start_tickets() == (0, 1, 2, 3, 4, 5)
    for ticket in (4, 5):
        ledger.finish_group(ticket)
    ledger.finish_step(1, ledger.next_batch(1))
    ledger.publish(1)
    assert ledger.start_tickets() == (6, 7)
    ledger.finish_group(6)
    ledger.finish_group(7)
    assert ledger.next_batch(2) is None, "four groups of version 0 would be left for the one step that may still take them"
    ledger.finish_group(0)
    assert ledger.next_batch(2) is None
    ledger.finish_group(1)
    assert ledger.next_batch(2) == (0, 1)


def test_the_state_is_plain_json_and_goes_on():
    ledger = RolloutLedger(groups=2, staleness=1)
    ledger.start_tickets()
    ledger.finish_group(0)
    ledger.finish_group(2)
    ledger.finish_step(1, ledger.next_batch(1))
    ledger.drop_group(1, "zero variance")
    state = json.loads(json.dumps(ledger.state()))
    assert state == {"step": 1, "version": 0, "next": 4, "alive": [3], "drops": [1]}
    again = RolloutLedger.from_state(state, ledger)
    assert again.state_of(3) == "waiting"
    assert again.start_tickets() == (3, 4, 5, 6)


@pytest.mark.parametrize(
    ("recorded", "used"),
    [
        (JournaledGroup(0, 0), True),
        (JournaledGroup(0, 1), True),
        (JournaledGroup(0, 2), False),
        (JournaledGroup(1, 1), True),
    ],
)
def test_a_record_is_used_where_its_weights_are_behind_the_checkpoint(recorded, used):
    state = {"step": 1, "version": 1, "next": 1, "alive": [0], "drops": []}
    ledger = RolloutLedger.from_state(state, RolloutLedger(groups=1, staleness=1), {0: recorded})
    assert ledger.state_of(0) == ("ready" if used else "waiting")


def test_a_record_that_is_too_old_is_sampled_again():
    state = {"step": 2, "version": 2, "next": 2, "alive": [1], "drops": []}
    rules = RolloutLedger(groups=1, staleness=1)
    ledger = RolloutLedger.from_state(
        state, rules, {1: JournaledGroup(0, 0), 2: JournaledGroup(2, 2), 3: JournaledGroup(2, 2, "equal")}
    )
    assert ledger.start_tickets(1) == (1,)
    assert ledger.start_tickets() == (), "2 is ready without sampling, and so there are two groups"
    assert ledger.ready() == (2,)
    ledger.finish_group(1)
    ledger.finish_step(3, ledger.next_batch(3))
    ledger.publish(3)
    assert ledger.start_tickets() == (4,), "3 was dropped before the crash, and is again"


def test_a_later_ticket_is_not_taken_up_where_it_would_get_too_old():
    """In the order of tickets, its turn would come too late."""
    state = {"step": 1, "version": 1, "next": 4, "alive": [0, 1, 2, 3], "drops": []}
    rules = RolloutLedger(groups=1, staleness=3, order="ticket")
    ledger = RolloutLedger.from_state(state, rules, {3: JournaledGroup(0, 0), 2: JournaledGroup(0, 0)})
    assert ledger.state_of(2) == "ready"
    assert ledger.state_of(3) == "waiting"


def test_records_of_larger_batches_are_taken_up_as_far_as_they_can_be_trained_in_time():
    """The run was resumed with fewer groups per step: three groups of version 0 are there, and one step may still take one of them."""
    state = {"step": 1, "version": 1, "next": 3, "alive": [0, 1, 2], "drops": []}
    records = dict.fromkeys((0, 1, 2), JournaledGroup(0, 0))
    ledger = RolloutLedger.from_state(state, RolloutLedger(groups=1, staleness=1), records)
    assert [ledger.state_of(ticket) for ticket in (0, 1, 2)] == ["ready", "waiting", "waiting"]
    assert ledger.start_tickets() == (1,)


# --- filters that drop too much -------------------------------------------------------------------------------------------------------


def drop_all(ledger, finish_order):
    """Let a filter want to drop everything, until a step could be trained; returns the tickets of the step."""
    for _ in range(1000):
        started = list(ledger.start_tickets())
        for ticket in finish_order(started):
            ledger.drop_group(ticket, "zero variance")
        if (tickets := ledger.next_batch(ledger.step + 1)) is not None:
            return tickets
    raise AssertionError("no step within 1000 rounds")


def test_filters_that_drop_everything_do_not_stop_training():
    ledger = RolloutLedger(groups=2, max_drop_share=0.9)
    taken = drop_all(ledger, list)
    assert taken == (2 * WINDOW_STEPS - 1, 2 * WINDOW_STEPS), "the first two of which more than 36 of 40 would be dropped"
    assert ledger.kept == 2
    ledger.finish_step(1, taken)
    ledger.publish(1)
    assert [drop_all(ledger, list)[-1] - taken[-1], ledger.kept] == [2, 4]


def test_what_is_kept_does_not_depend_on_which_group_finishes_first():
    shuffle = random.Random(1)

    def shuffle_tickets(tickets):
        return shuffle.sample(tickets, len(tickets))

    runs = []
    for order in (list, reversed, shuffle_tickets, shuffle_tickets):
        ledger, taken = RolloutLedger(groups=3, max_drop_share=0.5), []
        for _ in range(6):
            tickets = drop_all(ledger, order)
            taken.append(tickets)
            ledger.finish_step(ledger.step + 1, tickets)
            ledger.publish(ledger.step)
        runs.append((taken, ledger.kept))
    assert all(run == runs[0] for run in runs)


def test_a_run_can_be_told_to_stop_where_filters_drop_too_much():
    ledger = RolloutLedger(groups=1, max_drop_share=0.9, on_starved="stop")
    with pytest.raises(RolloutError, match="dropped more than 90% of the last 20 groups") as caught:
        drop_all(ledger, list)
    assert "rollouts.on_starved" in caught.value.remedy


def test_events_that_cannot_be_are_refused():
    ledger = RolloutLedger(groups=1)
    with pytest.raises(AssertionError, match="ticket 0 is waiting, not running"):
        ledger.finish_group(0)
    ledger.start_tickets()
    ledger.finish_group(0)
    with pytest.raises(AssertionError, match="ticket 0 is ready, not running"):
        ledger.fail_group(0)
    with pytest.raises(AssertionError, match="step 2 after step 0"):
        ledger.next_batch(2)
    ledger.finish_step(1, (0,))
    with pytest.raises(AssertionError, match="version 2 after 0"):
        ledger.publish(2)


def test_no_group_starts_that_no_step_trains_on():
    """Two steps of two groups, three behind: what is dropped is replaced, and nothing more is started."""
    ledger = RolloutLedger(groups=2, staleness=3, steps=2)
    assert ledger.start_tickets() == (0, 1, 2, 3)
    assert ledger.drop_group(0, "too easy")
    assert ledger.start_tickets() == (4,)
    for ticket in (1, 2, 3, 4):
        ledger.finish_group(ticket)
    for step in (1, 2):
        ledger.finish_step(step, ledger.next_batch(step))
        ledger.publish(step)
        assert ledger.start_tickets() == ()


def test_a_batch_is_in_the_order_of_tickets_though_older_weights_come_first():
    state = {"step": 2, "version": 2, "next": 2, "alive": [0, 1], "drops": []}
    rules = RolloutLedger(groups=2, staleness=1)
    ledger = RolloutLedger.from_state(state, rules, {1: JournaledGroup(1, 1)})
    assert ledger.start_tickets(1) == (0,)
    ledger.finish_group(0)
    assert (ledger.start_version(1), ledger.start_version(0)) == (1, 2)
    assert ledger.next_batch(3) == (0, 1)


def test_a_failed_group_decides_on_later_ones_that_wait_for_it():
    """One drop of twenty is allowed, and whether the last ticket's is a second one depends on those before it."""
    state = {"step": 19, "version": 19, "next": 19, "alive": [], "drops": []}
    ledger = RolloutLedger.from_state(state, RolloutLedger(groups=1, staleness=2, order="ticket", max_drop_share=0.05))
    assert ledger.start_tickets() == (19, 20, 21)
    assert ledger.drop_group(21, "equal") is None
    ledger.fail_group(19)
    assert ledger.state_of(21) == "undecided"
    ledger.fail_group(20)
    assert ledger.state_of(21) == "done", "no other can be dropped before it any more"


def test_a_checkpoint_keeps_the_drops_of_a_whole_window():
    """The last window of 20 steps of two groups has one drop at its first ticket; one is allowed, and a resumed run knows of it."""
    window = 2 * WINDOW_STEPS
    ledger = RolloutLedger(groups=2, max_drop_share=1 / window)
    for step in range(1, 32):
        started = list(ledger.start_tickets())
        while started:
            ticket = started.pop(0)
            if ticket == 21:
                assert ledger.drop_group(ticket, "equal") is True
                started += ledger.start_tickets()
            else:
                ledger.finish_group(ticket)
        ledger.finish_step(step, ledger.next_batch(step))
        ledger.publish(step)
        state = ledger.state()
        assert (21 in state["drops"]) == (22 <= state["next"] <= 21 + window)
        if state["next"] == 21 + window - 2:
            resumed = RolloutLedger.from_state(state, RolloutLedger(groups=2, max_drop_share=1 / window))
            assert resumed.start_tickets()[0] == 59
            assert resumed.drop_group(59, "equal") is False, "the second of a window"
