"""Answers in the order of calls: waited for late, taken many times, and never lost when they are failures."""

from functools import partial

import pytest

from skyrl_engine.workers.future import Calls, Future


def failing(message: str):
    def wait() -> int:
        raise ValueError(message)

    return wait


def test_an_answer_is_waited_for_once_and_taken_as_often_as_one_likes() -> None:
    waits = []
    future = Future(lambda: waits.append(1) or 7)
    assert not future.settled
    assert (future.result(), future.result(), future.then(lambda answer: answer + 1).result()) == (7, 7, 8)
    assert waits == [1]


def test_a_failure_is_raised_every_time() -> None:
    future = Future(failing("no"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            future.result()


def test_waiting_for_a_call_waits_for_those_before_it() -> None:
    calls, order = Calls(), []
    futures = [calls.make_future(partial(order.append, number)) for number in range(4)]
    futures[1].result()
    assert order == [0, 1]
    futures[0].result()
    calls.settle()
    assert order == [0, 1, 2, 3]


def test_an_earlier_failure_that_nobody_took_is_raised_by_a_later_answer_and_only_once() -> None:
    calls = Calls()
    first = calls.make_future(failing("first"))
    later, last = calls.make_future(lambda: 1), calls.make_future(lambda: 2)
    with pytest.raises(ValueError, match="first"):
        later.result()
    assert last.result() == 2
    with pytest.raises(ValueError, match="first"):
        first.result()


def test_a_failure_that_was_taken_hinders_nobody() -> None:
    calls = Calls()
    first = calls.make_future(failing("first"))
    with pytest.raises(ValueError, match="first"):
        first.result()
    calls.settle()
    assert calls.make_future(lambda: 3).result() == 3
