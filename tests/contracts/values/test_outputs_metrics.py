"""Metrics combine as they declare, in any grouping, and a NaN never hides."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.values.outputs import Metric, combine_metrics
from skyrl_engine.errors import ContractError

MAKERS = {
    "sum": Metric.sum,
    "mean": lambda value: Metric.mean(value, 2),
    "min": Metric.min,
    "max": Metric.max,
}


@given(st.sampled_from(sorted(MAKERS)), st.lists(st.integers(-99, 99), min_size=1, max_size=8), st.data())
def test_grouping_does_not_matter(reduction: str, values: list[int], data: st.DataObject) -> None:
    """Micro-batches into ranks into one equals all at once (integers, so float sums are exact)."""
    metrics = [MAKERS[reduction](value) for value in values]
    cut = data.draw(st.integers(0, len(metrics)))
    groups = [group for group in (metrics[:cut], metrics[cut:]) if group]
    assert Metric.combine(map(Metric.combine, groups)) == Metric.combine(metrics)


@pytest.mark.parametrize(("reduction", "result"), [("sum", 9), ("mean", 1.5), ("min", 2), ("max", 4)])
def test_results(reduction: str, result: float) -> None:
    assert Metric.combine([MAKERS[reduction](value) for value in (3, 2, 4)]).result == result


def test_a_mean_is_weighted_by_its_counts_not_by_its_parts() -> None:
    assert Metric.combine([Metric.mean(10, 1), Metric.mean(0, 9)]).result == 1.0


def test_a_tensor_with_a_gradient_is_read_out_without_a_warning() -> None:
    assert Metric.mean(torch.tensor(3.0, requires_grad=True), torch.tensor(2)).result == 1.5  # type: ignore[arg-type] # a tensor is a number


def test_a_mean_over_nothing_is_not_a_number() -> None:
    assert math.isnan(Metric.mean(0, 0).result)


@pytest.mark.parametrize("reduction", sorted(MAKERS))
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_shows_whatever_its_place(reduction: str, values: tuple[float, float]) -> None:
    assert math.isnan(Metric.combine(map(MAKERS[reduction], values)).result)


def test_values_leave_the_device() -> None:
    metric = Metric.mean(torch.tensor(3.0), torch.tensor(2))
    assert (type(metric.value), type(metric.count)) == (float, float)
    assert metric.result == 1.5


def test_parts_may_lack_a_metric() -> None:
    combined = combine_metrics([{"a": Metric.sum(1)}, {}, {"a": Metric.sum(2), "b": Metric.max(5)}])
    assert combined == {"a": Metric.sum(3), "b": Metric.max(5)}


def test_one_name_with_two_reductions_is_refused() -> None:
    with pytest.raises(ContractError, match="the metric 'clipped' is declared as mean and as sum"):
        combine_metrics([{"clipped": Metric.sum(1)}, {"clipped": Metric.mean(1, 1)}])
