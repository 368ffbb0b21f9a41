"""Learning rates at the corners of every schedule."""

import math

import pytest

from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.engine.schedule import learning_rate


def rates(optimizer: OptimizerConfig, steps: int, total: int) -> list[float]:
    return [learning_rate(optimizer, step, total) for step in range(steps)]


def test_constant() -> None:
    assert rates(OptimizerConfig(learning_rate=2.0), 4, 1) == [2.0] * 4


def test_warmup_reaches_the_full_rate_at_its_last_step_and_spends_no_step_at_zero() -> None:
    assert rates(OptimizerConfig(learning_rate=4.0, warmup_steps=4), 6, 6) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_linear_reaches_zero_only_after_the_last_step() -> None:
    optimizer = OptimizerConfig(learning_rate=4.0, schedule="linear", warmup_steps=2)
    assert rates(optimizer, 8, 6) == pytest.approx([2.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0][:8])


def test_cosine_is_half_way_down_half_way_through() -> None:
    optimizer = OptimizerConfig(learning_rate=2.0, schedule="cosine")
    expected = [2.0, 1 + math.cos(math.pi / 4), 1.0, 1 + math.cos(3 * math.pi / 4), 0.0, 0.0]
    assert rates(optimizer, 6, 4) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_warmup_alone(schedule: str) -> None:
    optimizer = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=3)  # type: ignore[arg-type] # parametrized
    assert rates(optimizer, 3, 3) == pytest.approx([1 / 3, 2 / 3, 1])
