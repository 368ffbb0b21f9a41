"""Learning rates at the corners of every schedule, and which parameters decay."""

import math

import pytest
import torch
from skyrl_engine.modeling.schedule import learning_rate

from skyrl_engine.contracts.kinds.backend import AdamWSettings
from skyrl_engine.modeling.optimizer import build_adamw, set_learning_rate


def rates(spec: AdamWSettings, steps: int) -> list[float]:
    return [learning_rate(spec, step) for step in range(steps)]


def test_constant() -> None:
    assert rates(AdamWSettings(learning_rate=2.0), 4) == [2.0] * 4


def test_warmup_reaches_the_full_rate_at_its_last_step_and_spends_no_step_at_zero() -> None:
    assert rates(AdamWSettings(learning_rate=4.0, warmup_steps=4, total_steps=6), 6) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_linear_reaches_zero_only_after_the_last_step() -> None:
    spec = AdamWSettings(learning_rate=4.0, schedule="linear", warmup_steps=2, total_steps=6)
    assert rates(spec, 8) == pytest.approx([2.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0][:8])


def test_cosine_is_half_way_down_half_way_through() -> None:
    spec = AdamWSettings(learning_rate=2.0, schedule="cosine", total_steps=4)
    expected = [2.0, 1 + math.cos(math.pi / 4), 1.0, 1 + math.cos(3 * math.pi / 4), 0.0, 0.0]
    assert rates(spec, 6) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_warmup_alone(schedule: str) -> None:
    spec = AdamWSettings(learning_rate=1.0, schedule=schedule, warmup_steps=3, total_steps=3)  # type: ignore[arg-type] # parametrized
    assert rates(spec, 3) == pytest.approx([1 / 3, 2 / 3, 1])


def test_only_matrices_decay() -> None:
    """With a zero gradient an AdamW step multiplies what decays by 1 - rate * decay and leaves the rest as it is."""
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    optimizer = build_adamw(layer.parameters(), AdamWSettings(weight_decay=0.5))
    set_learning_rate(optimizer, 0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in layer.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_frozen_parameters_stay_out() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    (group,) = build_adamw(layer.parameters(), AdamWSettings()).param_groups
    assert group["params"] == [layer.bias]
