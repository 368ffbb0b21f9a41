"""An actor hands failures back as values, and begins nothing after one that the controller does not know of."""

import pytest

pytest.importorskip("ray")

from attrs import frozen

from skyrl_engine.errors import DataError
from skyrl_engine.workers.messages import Message
from skyrl_engine.workers.ray_actor import Failure, RankActor


@frozen
class Take(Message[int]):
    """A message to a list that takes the place of the rank's worker, and knows what was begun."""

    number: int
    verb = "take"

    def answer(self, rank):
        rank.append(self.number)
        if self.number < 0:
            raise DataError("a number below 0", remedy="Give another")
        return self.number


def test_calls_behind_a_failure_wait_until_the_controller_knows_of_it():
    """They were sent before, and the other ranks would take their collectives for those of the failed call."""
    begun = []
    actor = RankActor.__new__(RankActor)
    actor._worker, actor._failures = begun, 0
    assert actor.call(Take(1), None, 0) == 1
    failed = actor.call(Take(-1), None, 0)
    assert isinstance(failed, Failure)
    assert isinstance(failed.error, DataError)
    assert failed.was_begun
    left_out = actor.call(Take(2), None, 0)
    assert isinstance(left_out, Failure)
    assert not left_out.was_begun
    assert "was not begun" in left_out.cause
    assert actor.call(Take(3), None, 1) == 3
    assert begun == [1, -1, 3]
