"""Two steps in a row with too large a distance stop a run, and no number is no small one."""

import logging

import pytest

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.guard import SamplerGuard


def test_two_steps_in_a_row_stop_the_run() -> None:
    guard = SamplerGuard(0.1)
    for gap in (0.2, 0.1, 0.2, 0.0):
        guard.look(gap, 1)
    guard.look(0.5, 6)
    with pytest.raises(RolloutError, match=r"by 0.41 nats per token, at version 7 and the one before it: above 0.1"):
        guard.look(0.41, 7)


def test_a_sampler_that_never_took_weights_is_told_as_such() -> None:
    guard = SamplerGuard(0.1, above=1)
    with pytest.raises(RolloutError, match=r"its log-probabilities are those of version 0, so no update has reached it"):
        guard.look(0.4, 7, gap_to_first=0.05)
    with pytest.raises(RolloutError) as caught:
        guard.look(0.4, 7, gap_to_first=0.2)
    assert "version 0" not in caught.value.cause


def test_a_distance_that_is_no_number_is_too_large() -> None:
    guard = SamplerGuard(0.1)
    guard.look(float("nan"), 0)
    with pytest.raises(RolloutError):
        guard.look(float("nan"), 1)


def test_a_warning_is_enough_where_that_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    guard = SamplerGuard(0.1, stops=False)
    with caplog.at_level(logging.WARNING):
        guard.look(1.0, 0)
        assert not caplog.records
        guard.look(1.0, 1)
    assert "does not hold the weights it was given" in caplog.text


def test_the_limit_is_that_of_the_precision_unless_it_is_given() -> None:
    assert SamplerGuard.of(None, "float32").limit == 1e-3
    assert SamplerGuard.of(None, "bfloat16").limit == 0.05
    assert SamplerGuard.of(0.3, "bfloat16", stops=False) == SamplerGuard(0.3, stops=False)
