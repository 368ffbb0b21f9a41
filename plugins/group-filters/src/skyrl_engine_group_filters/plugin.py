"""Entry points of the filters."""

import math

from attrs import field, frozen
from attrs.validators import ge, lt, optional

from skyrl_engine import group_filter
from skyrl_engine.contracts import GroupView

_FINITE = lt(float("inf"))


@frozen(kw_only=True)
class VarianceOptions:
    """Options of `zero_variance`."""

    tolerance: float = field(default=0.0, validator=[ge(0.0), _FINITE])
    """Largest difference between two rewards of a group that still counts as equal."""


@group_filter(config=VarianceOptions)
def zero_variance(group: GroupView, options: VarianceOptions) -> str | None:
    """Drop a group whose rewards are all equal: advantages that compare them are 0."""
    return "zero_variance" if float(group.rewards.max() - group.rewards.min()) <= options.tolerance else None


@frozen(kw_only=True)
class RangeOptions:
    """Options of `reward_range`."""

    low: float | None = field(default=None, validator=optional([ge(-float("inf")), _FINITE]))
    """Smallest mean reward of a group to train on; none: no bound."""

    high: float | None = field(default=None, validator=optional([ge(-float("inf")), _FINITE]))
    """Largest mean reward of a group to train on; none: no bound."""

    def __attrs_post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")


@group_filter(config=RangeOptions)
def reward_range(group: GroupView, options: RangeOptions) -> str | None:
    """Drop a group whose mean reward lies outside of [`low`, `high`]. The sum is exact, so that the order of attempts changes nothing."""
    mean = math.fsum(group.rewards.tolist()) / len(group.rewards)
    if options.low is not None and mean < options.low:
        return "too_low"
    return "too_high" if options.high is not None and mean > options.high else None
