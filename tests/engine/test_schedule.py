"""Learning rates at the corners of every schedule."""

import math
from typing import Any

import pytest
import torch
from transformers import optimization

from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.engine.schedule import learning_rate, refuse_impossible_schedule
from skyrl_engine.errors import UnsupportedError


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


WARMUP, TOTAL = 5, 23
OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({}, {"num_training_steps": TOTAL}),
    "cosine": ({}, {"num_training_steps": TOTAL}),
    "cosine_with_min": ({"min_ratio": 0.3}, {"num_training_steps": TOTAL, "min_lr_rate": 0.3}),
    "polynomial": ({"min_ratio": 0.25, "power": 2.5}, {"num_training_steps": TOTAL, "lr_end": 0.5, "power": 2.5}),
    "inverse_sqrt": ({}, {}),
    "inverse_sqrt timescale": ({"timescale": 7}, {"timescale": 7}),
    **{
        f"wsd {form}": (
            {"decay_steps": 8, "decay": form, "warmup": form},
            {"num_training_steps": TOTAL, "num_decay_steps": 8, "decay_type": form, "warmup_type": form},
        )
        for form in ("linear", "cosine", "1-sqrt")
    },
    "wsd min": (
        {"decay_steps": 8, "decay": "linear", "min_ratio": 0.2},
        {"num_training_steps": TOTAL, "num_decay_steps": 8, "decay_type": "linear", "min_lr_ratio": 0.2},
    ),
}
FUNCTIONS = {
    "linear": optimization.get_linear_schedule_with_warmup,
    "cosine": optimization.get_cosine_schedule_with_warmup,
    "cosine_with_min": optimization.get_cosine_with_min_lr_schedule_with_warmup,
    "polynomial": optimization.get_polynomial_decay_schedule_with_warmup,
    "inverse_sqrt": optimization.get_inverse_sqrt_schedule,
    "wsd": optimization.get_wsd_schedule,
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_rates_are_those_of_transformers(name: str) -> None:
    """From the end of the warm-up on step by step, beyond the last step too. Warm-ups here are one step ahead: none is at rate 0."""
    ours, theirs = OF_TRANSFORMERS[name]
    schedule = name.split(maxsplit=1)[0]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = FUNCTIONS[schedule](optimizer, num_warmup_steps=WARMUP, **theirs)
    expected = []
    for _ in range(TOTAL + 4):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    got = rates(OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_steps=WARMUP, **ours), TOTAL + 4, TOTAL)  # type: ignore[arg-type] # parametrized
    end = (
        TOTAL + 4 if schedule not in ("linear", "cosine", "cosine_with_min") else TOTAL + 1
    )  # where transformers' cosine rises again
    assert got[WARMUP:end] == pytest.approx(expected[WARMUP:end], rel=1e-12, abs=1e-15)
    assert got[end:] == pytest.approx([got[TOTAL]] * len(got[end:]))
    if name != "wsd min":  # whose warm-up begins at the minimum there
        assert got[: WARMUP - 1] == pytest.approx(expected[1:WARMUP], rel=1e-12)


def test_a_schedule_whose_end_nobody_knows_or_that_is_too_short_is_refused() -> None:
    refuse_impossible_schedule(OptimizerConfig(schedule="inverse_sqrt"), None)
    wsd = OptimizerConfig(schedule="wsd", warmup_steps=2, decay_steps=3)
    refuse_impossible_schedule(wsd, 5)
    with pytest.raises(UnsupportedError, match="nobody says how many"):
        refuse_impossible_schedule(wsd, None)
    with pytest.raises(UnsupportedError, match=r"take 5 steps .* and there are 4"):
        refuse_impossible_schedule(wsd, 4)
    with pytest.raises(UnsupportedError, match=r"warm-up takes 3 steps .* and there are 2"):
        refuse_impossible_schedule(OptimizerConfig(warmup_steps=3), 2)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_warmup_alone(schedule: str) -> None:
    optimizer = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=3)  # type: ignore[arg-type] # parametrized
    assert rates(optimizer, 3, 3) == pytest.approx([1 / 3, 2 / 3, 1])
