"""The failure monitor: which failures end a run, what is said, and what is logged."""

import logging

import pytest

from skyrl_engine import RolloutError
from skyrl_engine.rollout.failure_monitor import WINDOW, FailureMonitor


def fail(monitor: FailureMonitor, number: int, *, has_answered: bool = False, all_first_ended: bool = False) -> None:
    cause = f"timed out at task '{number}'"
    monitor.record(str(number), cause, has_answered=has_answered, all_first_ended=all_first_ended)


def test_more_failures_than_the_share_end_a_run() -> None:
    monitor = FailureMonitor(max_share=0.1, group_size=2)
    monitor.record("0", None, has_answered=True, all_first_ended=True)
    for number in range(20):
        fail(monitor, number, all_first_ended=True)
    with pytest.raises(RolloutError, match="21 of the last 22 attempts failed, and") as caught:
        fail(monitor, 20, all_first_ended=True)
    assert list(caught.value.details) == ["21 x timed out at task '0' and others"]


@pytest.mark.parametrize(("group_size", "first"), [(2, 8), (12, 12)])
@pytest.mark.parametrize("known", ["has_answered", "all_first_ended"])
def test_a_run_whose_first_attempts_all_failed_ends(group_size: int, first: int, known: str) -> None:
    monitor = FailureMonitor(max_share=1.0, group_size=group_size)
    for number in range(first - 1):
        fail(monitor, number, **{known: True})
    with pytest.raises(RolloutError, match=f"all of the first {first} attempts failed"):
        fail(monitor, first, **{known: True})


def test_failures_before_others_answer_are_no_reason_to_end() -> None:
    monitor = FailureMonitor(max_share=1.0, group_size=2)
    for number in range(40):
        fail(monitor, number)


def test_all_may_fail_where_the_run_says_so() -> None:
    monitor = FailureMonitor(max_share=1.0, group_size=2, all_may_fail=True)
    for number in range(2 * WINDOW):
        fail(monitor, number, has_answered=True, all_first_ended=True)


def test_the_first_of_a_kind_is_a_warning_and_five_kinds_at_most(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monitor = FailureMonitor(max_share=1.0, group_size=2, all_may_fail=True)
    for number in range(3):
        fail(monitor, number)
    for kind in range(9):
        monitor.record("7", f"error {kind}", has_answered=False, all_first_ended=False)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO", "INFO", *["WARNING"] * 4, *["INFO"] * 5]
