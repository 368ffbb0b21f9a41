"""Each filter keeps the promises, and drops what it says."""

import numpy as np
import pytest

from skyrl_engine.contracts import GroupView
from skyrl_engine.testing import GroupFilterConformance
from skyrl_engine_group_filters.plugin import RangeOptions, VarianceOptions, reward_range, zero_variance


class TestZeroVariance(GroupFilterConformance):
    plugin = "skyrl-engine-group-filters:zero_variance"

    def oracle(self, group):
        return "zero_variance" if len(set(group.rewards.tolist())) == 1 else None


def _suite(name, options):
    return type(f"Test_{name}", (GroupFilterConformance,), {"plugin": f"skyrl-engine-group-filters:{name}", "options": options})


TestZeroVarianceWithTolerance = _suite("zero_variance", {"tolerance": 0.25})
TestRewardRange = _suite("reward_range", {"low": 0.1, "high": 0.9})


def view(*rewards):
    count = len(rewards)
    return GroupView(
        "spell",
        np.array(rewards, dtype=np.float64),
        np.zeros(count, dtype=np.bool_),
        np.ones(count, dtype=np.int64),
        np.zeros(count, dtype=np.bool_),
    )


@pytest.mark.parametrize(
    ("rewards", "tolerance", "reason"),
    [
        ((3.3,) * 12, 0.0, "zero_variance"),
        ((0.5,), 0.0, "zero_variance"),
        ((0.0, 1e-12), 0.0, None),
        ((0.0, 1e-12), 1e-6, "zero_variance"),
        ((0.0, 0.5, 1.0), 0.5, None),
    ],
)
def test_zero_variance(rewards, tolerance, reason):
    assert zero_variance(view(*rewards), VarianceOptions(tolerance=tolerance)) == reason


@pytest.mark.parametrize(
    ("rewards", "options", "reason"),
    [
        ((0.0, 0.0), {"low": 0.1}, "too_low"),
        ((0.0, 0.2), {"low": 0.1}, None),
        ((1.0, 1.0), {"high": 0.9}, "too_high"),
        ((1.0, 1.0), {}, None),
        ((0.1,) * 10, {"low": 0.1, "high": 0.1}, None),
    ],
)
def test_reward_range(rewards, options, reason):
    assert reward_range(view(*rewards), RangeOptions(**options)) == reason


def test_bounds_that_cross_are_refused():
    with pytest.raises(ValueError, match=r"low = 0.9 is above high = 0.1"):
        RangeOptions(low=0.9, high=0.1)
    with pytest.raises(ValueError, match="'tolerance' must be >= 0"):
        VarianceOptions(tolerance=-1)


def test_a_mean_is_of_the_exact_sum():
    """In any order: a rounded sum of these rewards is 0."""
    drop = reward_range.skyrl_engine_make_group_filter(RangeOptions(low=0.2))
    for rewards in ((1e16, 1.0, -1e16), (1.0, 1e16, -1e16)):
        assert drop(view(*rewards)) is None
