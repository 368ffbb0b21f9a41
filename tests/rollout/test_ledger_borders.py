"""Borders of the ledger's rules: the first ticket that counts and the last, and one group more or less."""

import pytest

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.ledger import WINDOW_STEPS, JournaledGroup, RolloutLedger


def run_in_order(ledger, dropped, last):
    """Train ticket after ticket; return what `drop_group` says of those that a filter wants to drop."""
    answers = {}
    while True:
        for ticket in ledger.start_tickets():
            if ticket > last:
                return answers
            if ticket in dropped:
                answers[ticket] = ledger.drop_group(ticket, "equal")
            else:
                ledger.finish_group(ticket)
        tickets = ledger.next_batch(ledger.step + 1)
        if tickets is not None:
            ledger.finish_step(ledger.step + 1, tickets)
            ledger.publish(ledger.step)


@pytest.mark.parametrize(
    ("dropped", "answers"),
    [
        ((0, 19), (True, False)),
        ((0, 20), (True, True)),
        ((0, 20, 39), (True, True, False)),
        ((0, 20, 40), (True, True, True)),
        ((0, 1, 2), (True, True, True)),
    ],
)
def test_one_of_twenty_may_be_dropped_in_every_window(dropped, answers):
    ledger = RolloutLedger(groups=1, max_drop_share=1 / WINDOW_STEPS)
    assert run_in_order(ledger, dropped, last=45) == dict(zip(dropped, answers, strict=True))


def test_nothing_is_kept_against_a_filter_before_a_window_is_full():
    assert run_in_order(RolloutLedger(groups=1, max_drop_share=0.0), {17, 18, 19}, last=25) == {17: True, 18: True, 19: False}
    early = set(range(5, 38))
    assert run_in_order(RolloutLedger(groups=2, max_drop_share=0.0), early | {38, 39}, last=44) == {
        **dict.fromkeys(early | {38}, True),
        39: False,
    }


def test_a_drop_counts_as_long_as_a_window_of_an_open_ticket_reaches_it():
    """Ticket 21 is open when ticket 24 is started; its window begins at 2."""
    resumed = RolloutLedger.from_state(
        {"step": 20, "version": 20, "next": 21, "alive": [], "drops": [2]},
        RolloutLedger(groups=1, staleness=3, order="ticket", max_drop_share=1 / WINDOW_STEPS),
    )
    assert resumed.start_tickets() == (21, 22, 23, 24)
    resumed.finish_group(22)
    assert resumed.drop_group(21, "equal") is False


def test_out_of_order_a_drop_does_not_wait_for_earlier_tickets():
    ledger = RolloutLedger.from_state(
        {"step": 19, "version": 19, "next": 19, "alive": [], "drops": []},
        RolloutLedger(groups=1, staleness=2, max_drop_share=1 / WINDOW_STEPS),
    )
    assert ledger.start_tickets() == (19, 20, 21)
    assert ledger.drop_group(21, "equal") is True
    assert ledger.drop_group(20, "equal") is True, "no other in the window that ends with it"
    assert ledger.start_tickets() == (22, 23)
    assert ledger.drop_group(22, "equal") is False


def test_who_ends_the_run_for_too_many_drops_names_the_reason():
    ledger = RolloutLedger(groups=1, max_drop_share=0.0, on_starved="stop")
    for ticket in range(19):
        assert ledger.start_tickets() == (ticket,)
        ledger.drop_group(ticket, "all equal")
    assert ledger.start_tickets() == (19,)
    with pytest.raises(RolloutError, match=r"\(group 19: all equal\)"):
        ledger.drop_group(19, "all equal")


def test_no_batch_of_fewer_groups_than_a_step_has():
    ledger = RolloutLedger(groups=2, staleness=1)
    assert ledger.start_tickets() == (0, 1, 2, 3)
    ledger.finish_group(0)
    assert ledger.next_batch(1) is None
    ledger.finish_group(1)
    ledger.finish_step(1, ledger.next_batch(1))
    ledger.finish_group(2)
    assert ledger.next_batch(2) is None
    ledger.finish_group(3)
    assert ledger.next_batch(2) == (2, 3)


def test_no_more_run_than_may_run_at_a_time():
    ledger = RolloutLedger(groups=4, staleness=1, concurrency=3)
    assert ledger.start_tickets() == (0, 1, 2)
    assert ledger.may_start() == 0
    ledger.finish_group(1)
    assert ledger.may_start() == 1
    assert ledger.start_tickets() == (3,)


def test_a_version_may_be_published_again():
    ledger = RolloutLedger(groups=1)
    ledger.publish(0)
    assert ledger.version == 0


def test_in_the_order_of_tickets_a_record_is_used_as_long_as_its_turn_comes_in_time():
    """Two groups a step, two steps of staleness: of version 1, the last turn is that of step 3, and of step 2 + 2 // 2 = 3 the tickets 2, 3."""
    state = {"step": 2, "version": 2, "next": 6, "alive": [0, 1, 2, 3, 4, 5], "drops": []}
    rules = RolloutLedger(groups=2, staleness=2, order="ticket")
    ledger = RolloutLedger.from_state(state, rules, dict.fromkeys(range(6), JournaledGroup(1, 1)))
    assert [ledger.state_of(ticket) for ticket in range(6)] == ["ready"] * 4 + ["waiting"] * 2


def test_out_of_order_as_many_records_are_used_as_steps_can_train_in_time():
    """Two groups a step, one step of staleness: two groups of version 1 or older, and four of version 2 or older."""
    state = {"step": 2, "version": 2, "next": 6, "alive": [0, 1, 2, 3, 4, 5], "drops": []}
    records = {ticket: JournaledGroup(1, 1) if ticket < 3 else JournaledGroup(2, 2) for ticket in range(6)}
    ledger = RolloutLedger.from_state(state, RolloutLedger(groups=2, staleness=1), records)
    assert [ledger.state_of(ticket) for ticket in range(6)] == ["ready", "ready", "waiting", "ready", "ready", "waiting"]
    assert ledger.pop_recalled() == (0, 1, 3, 4)
    assert ledger.pop_recalled() == ()


def test_a_record_of_a_failed_group_is_one():
    state = {"step": 1, "version": 1, "next": 2, "alive": [0, 1], "drops": []}
    ledger = RolloutLedger.from_state(state, RolloutLedger(groups=2, staleness=1), {0: JournaledGroup(1, 1, failed=True)})
    assert (ledger.state_of(0), ledger.state_of(1)) == ("done", "waiting")
    assert ledger.pop_recalled() == (0,)
