"""An error of cleaning up never takes the place of the error that made it necessary."""

import logging
from collections.abc import Callable

import pytest

from skyrl_engine.cleanup import close_after, finally_close


def failing(words: str) -> Callable[[], None]:
    def fail() -> None:
        raise ValueError(words)

    return fail


def test_the_first_error_is_raised_and_the_others_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="first"), finally_close(failing("third")), finally_close(failing("second")):
        raise KeyError("first")
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["second", "third"]
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_without_an_earlier_error_that_of_closing_is_raised_and_the_rest_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []
    with pytest.raises(ValueError, match="second"), finally_close(lambda: closed.append("first")), finally_close(failing("second")):
        pass
    assert closed == ["first"]
    assert not caplog.records


def test_every_body_is_followed_by_its_close() -> None:
    closed: list[str] = []
    with finally_close(lambda: closed.append("one")):
        assert closed == []
    assert closed == ["one"]


def test_an_error_that_is_known_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    close_after(KeyError("first"), failing("second"))
    assert "second" in caplog.text
    with pytest.raises(ValueError, match="alone"):
        close_after(None, failing("alone"))


def test_an_interrupt_is_never_kept_back() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        close_after(KeyError("first"), interrupted)
