"""The norm that clips is one number for every division of the gradient, and exact."""

import math

import numpy as np
import pytest
import torch

from skyrl_engine.modeling.norms import clipping_factor, sum_of_squares

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    """Five million numbers, more than are copied at a time, over many orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5_000_000, generator=generator) * torch.rand(5_000_000, generator=generator).pow(8)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_sum_does_not_depend_on_the_division(gradient: torch.Tensor, parts: int) -> None:
    """Against numpy's pairwise sum in float64: both are exact to about 1e-14, where sums in float32 are off by 1e-7 to 1e-4."""
    expected = float(np.square(gradient.numpy().astype(np.float64)).sum())
    assert float(sum_of_squares(torch.tensor_split(gradient, parts), CPU)) == pytest.approx(expected, rel=1e-13)


def test_parts_of_any_shape_and_precision() -> None:
    parts = [torch.full((2, 3), 2.0).T, torch.tensor(3.0), torch.empty(0), torch.tensor([1.0], dtype=torch.bfloat16)]
    total = sum_of_squares(parts, CPU)
    assert (float(total), total.dtype) == (6 * 4 + 9 + 1, torch.float64)


def test_large_numbers_are_finite_and_the_infinite_is_not() -> None:
    assert float(sum_of_squares([torch.full((4,), 3e38)], CPU)) == pytest.approx(4 * float(torch.tensor(3e38)) ** 2, rel=1e-12)
    assert math.isinf(float(sum_of_squares([torch.tensor([1.0, float("-inf")])], CPU)))
    assert math.isnan(float(sum_of_squares([torch.tensor([1.0, float("nan")])], CPU)))


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [(4.0, 2.0, 2.0 / (4.0 + 1e-6)), (2.0, 2.0, None), (4.0, None, None), (math.inf, 2.0, None), (math.nan, 2.0, None)],
)
def test_only_a_finite_norm_beyond_the_limit_is_clipped(norm: float, limit: float | None, factor: float | None) -> None:
    assert clipping_factor(norm, limit) == factor
