"""An actor hands failures back as values, and begins nothing behind one that the controller does not know of."""

import pytest

pytest.importorskip("ray")

from skyrl_engine.errors import DataError
from skyrl_engine.workers.ray_actor import Failure, RankActor


class Numbers:
    """Stands where the rank's worker stands, and knows what was begun."""

    def __init__(self):
        self.begun = []

    def take(self, number):
        self.begun.append(number)
        if number < 0:
            raise DataError("a number below 0", remedy="Give another")
        return number


def test_calls_behind_a_failure_wait_until_the_controller_knows_of_it():
    """They were sent before, and the other ranks would take their collectives for those of the failed call."""
    actor, numbers = RankActor.__new__(RankActor), Numbers()
    actor._worker, actor._failures = numbers, 0
    assert actor.call("take", (1,), None, 0) == 1
    failed = actor.call("take", (-1,), None, 0)
    assert isinstance(failed, Failure)
    assert isinstance(failed.error, DataError)
    assert failed.met
    left_out = actor.call("take", (2,), None, 0)
    assert isinstance(left_out, Failure)
    assert not left_out.met
    assert "was not begun" in left_out.cause
    assert actor.call("take", (3,), None, 1) == 3
    assert numbers.begun == [1, -1, 3]
