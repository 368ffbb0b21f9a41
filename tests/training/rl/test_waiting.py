"""A run whose steps wait for environments says once what helps."""

import pytest
from rl_runs import Rl

from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.rl.waiting import EnvironmentWaits

HINT = "raise rollouts.workers"


def test_a_run_that_waits_for_environments_says_so_once(rl: Rl, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run_rl(rl("run", "rl.steps=4", environment={"jitter": 0.2}))
    assert caplog.text.count(HINT) == 1
    assert "1 process answers 9 attempts, one call at a time" in caplog.text


@pytest.mark.parametrize(
    ("reported", "processes", "tells"),
    [
        ({"time/environment": 6.0}, 1, True),
        ({"time/environment": 4.0}, 1, False),
        ({"time/environment": 9.0}, 16, False),
        ({"time/environment": 9.0, "time/wait": 1.0, "async/attempts_at_environment": 12.0}, 1, False),
        ({"time/wait": 6.0, "async/attempts_at_environment": 12.0}, 4, True),
        ({"time/wait": 6.0, "async/attempts_at_environment": 3.0}, 4, False),
        ({}, 1, False),
    ],
)
def test_it_is_told_where_more_processes_would_help(reported: dict[str, float], processes: int, tells: bool) -> None:
    waits = EnvironmentWaits(processes)
    told = [waits.describe(reported, 10.0, 16) is not None for _ in range(3)]
    assert told == [False, tells, False], "the first step starts processes, and nothing is told twice"
