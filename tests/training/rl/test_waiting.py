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
    ("phases", "waiting", "processes", "tells"),
    [
        ({"environment": 6.0}, None, 1, True),
        ({"environment": 4.0}, None, 1, False),
        ({"environment": 9.0}, None, 16, False),
        ({"environment": 9.0, "wait": 1.0}, 12.0, 1, False),
        ({"wait": 6.0}, 12.0, 4, True),
        ({"wait": 6.0}, 3.0, 4, False),
        ({}, None, 1, False),
    ],
)
def test_it_is_told_where_more_processes_would_help(
    phases: dict[str, float], waiting: float | None, processes: int, tells: bool
) -> None:
    waits = EnvironmentWaits(processes)
    reported = {} if waiting is None else {"async/attempts_at_environment": waiting}
    told = [waits.describe(phases, reported, 10.0, 16) is not None for _ in range(3)]
    assert told == [False, tells, False], "the first step starts processes, and nothing is told twice"
