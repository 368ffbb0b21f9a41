"""Progress: rates over the last steps, time left from them."""

from pathlib import Path

import pytest

from skyrl_engine.contracts.kinds.observer import EvaluationFinished, SessionFinished, SessionStarted, StepFinished
from skyrl_engine.run.progress import Progress, ProgressObserver


def test_rates_and_time_left_come_from_the_last_steps() -> None:
    seen: list[Progress] = []
    observer = ProgressObserver(seen.append)
    observer.skyrl_engine_session_started(SessionStarted(Path(), {}, total_steps=50, start_step=10))
    assert seen[-1] == Progress(10, 50)
    assert str(seen[-1]) == "step 10/50"
    for step in range(11, 41):
        seconds = 100.0 if step <= 20 else 2.0  # the first ten are outside the window
        observer.skyrl_engine_step_finished(StepFinished(step, 50, {"loss": 1.5, "tokens": 300.0, "grad_norm": 0.5}, seconds))
    assert seen[-1].tokens_per_second == pytest.approx(150.0)
    assert seen[-1].seconds_left == pytest.approx(20.0)
    assert str(seen[-1]) == "step 40/50, loss 1.5000, 150 tokens/s, 0:20 left"
    observer.skyrl_engine_evaluation_finished(EvaluationFinished(40, {"loss": 1.25}, 1.0))
    observer.skyrl_engine_session_finished(SessionFinished(40))
    assert seen[-1].finished
    assert str(seen[-1]) == "step 40/50, loss 1.5000, evaluation loss 1.2500, 150 tokens/s"
