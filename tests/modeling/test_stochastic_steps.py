"""Rounding at random has the mean of what is rounded, and a step without float32 weights is AdamW's up to that rounding."""

import math

import pytest
import torch
from torch import nn

from skyrl_engine.contracts import AdamWSettings
from skyrl_engine.modeling.optimizer import build_optimizer
from skyrl_engine.modeling.stochastic_steps import round_stochastically

DRAWS = 20_000

SETTINGS = AdamWSettings(learning_rate=3e-4, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=None, stochastic_rounding=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("number", [1.0 + 1e-4, -1.0 - 1e-3, 0.3, 1e-30, -7.77e20, 2.0**-126 * 1.3])
def test_the_mean_is_the_number(number: float) -> None:
    """A draw is one of two neighbours, `gap` apart, so its standard deviation is at most gap / 2; six of the mean's are the bound.

    A rounding to the nearest is off by up to gap / 2 = 70 of them, and truncation by up to twice as much.
    """
    exact = torch.full((DRAWS,), number)
    rounded = round_stochastically(exact, generator())
    assert rounded.dtype == torch.bfloat16
    neighbours = rounded.double().unique()
    assert len(neighbours) == 2
    low, high = neighbours.tolist()
    assert low < exact[0].item() < high
    assert high - low <= 2**-7 * abs(high)
    assert abs(rounded.double().mean().item() - exact[0].item()) <= 6 * (high - low) / 2 / math.sqrt(DRAWS)


def test_what_bfloat16_holds_stays() -> None:
    held = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-126, float("inf"), -float("inf")])
    for seed in range(20):
        assert torch.equal(round_stochastically(held, generator(seed)).float(), held)
    assert round_stochastically(torch.tensor([float("nan")]), generator()).isnan().all()


def step_twice(names: tuple[str, ...], dtype: torch.dtype, settings: AdamWSettings, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights after two steps, the gradients of which are large and small."""
    draw = torch.Generator().manual_seed(3)
    start = torch.randn(40, 50, generator=draw).bfloat16()
    parameters = {name: nn.Parameter(start.to(dtype, copy=True)) for name in names}
    optimizer = build_optimizer(parameters, settings, seed=seed)
    for scale in (1.0, 1e-3):
        gradient = scale * torch.randn(40, 50, generator=draw)
        for parameter in parameters.values():
            parameter.grad_dtype = torch.float32
            parameter.grad = gradient.clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_a_step_ends_at_a_neighbour_of_adamws() -> None:
    """One step, from the same weights; moments are float32, or a second step of another size would be off by their rounding."""
    plain = AdamWSettings(learning_rate=3e-4, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=None)
    due = step_twice(("w",), torch.float32, plain)["w"]
    got = step_twice(("w",), torch.bfloat16, SETTINGS)["w"]
    assert got.dtype == torch.bfloat16
    gap = 2.0 ** (due.abs().log2().floor() - 7)
    assert ((got.float() - due).abs() <= 2 * gap).all(), "two roundings, each by less than the distance of neighbours"
    error = (got.double() - due.double()).mean().abs()
    assert error <= 6 * gap.double().pow(2).mean().sqrt() / math.sqrt(due.numel()), "rounded to one side"
    moved = (got.float() != step_twice(("w",), torch.bfloat16, SETTINGS, seed=1)["w"].float()).float().mean()
    assert moved > 0.05, "the seed decides nothing"


def test_what_is_drawn_follows_from_seed_and_name_alone() -> None:
    first = step_twice(("a", "b"), torch.bfloat16, SETTINGS)
    torch.manual_seed(99)
    again = step_twice(("b", "a"), torch.bfloat16, SETTINGS)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["a"], first["b"]), "parameters of one shape are rounded alike"
