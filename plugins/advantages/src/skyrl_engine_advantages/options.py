"""Options of the estimators."""

from collections.abc import Mapping
from typing import Literal, get_args

from attrs import Factory, field, frozen
from attrs.validators import and_, ge, gt, in_, le, lt, optional

Normalize = Literal["none", "group", "batch"]
EPSILON = 1e-6


@frozen(kw_only=True)
class SharedOptions:
    """Options that every estimator takes."""

    epsilon: float = field(default=EPSILON, validator=[ge(0), lt(float("inf"))])
    """Number that is added to a standard deviation before it divides."""

    clip: float | None = field(default=None, validator=optional(and_(gt(0), lt(float("inf")))))
    """Largest magnitude of an advantage; none: no limit."""


@frozen(kw_only=True)
class GroupOptions(SharedOptions):
    """Options of estimators that compare the trajectories of one group."""

    normalize: Normalize = field(default="none", validator=in_(get_args(Normalize)))
    """Division by the standard deviation of the `group`'s rewards, of all scored tokens of the `batch` less their mean, or `none`."""


@frozen(kw_only=True)
class GrpoOptions(GroupOptions):
    """Options of `grpo`."""

    normalize: Normalize = field(default="group", validator=in_(get_args(Normalize)))
    """Division by the standard deviation of the `group`'s rewards, of all scored tokens of the `batch` less their mean, or `none`."""


@frozen(kw_only=True)
class GdpoOptions(SharedOptions):
    """Options of `gdpo`."""

    weights: Mapping[str, float] = Factory(dict)
    """Weights of the parts of the reward by name, after each was normalised; 1 for parts that are not named."""


@frozen(kw_only=True)
class BaselineOptions(GroupOptions):
    """Options of `reinforce_pp_baseline`."""

    normalize: Normalize = field(default="batch", validator=in_(get_args(Normalize)))
    """Division by the standard deviation of the `group`'s rewards, of all scored tokens of the `batch` less their mean, or `none`."""


@frozen(kw_only=True)
class TokenOptions(SharedOptions):
    """Options of estimators that walk along a trajectory's tokens."""

    gamma: float = field(default=1.0, validator=and_(ge(0.0), le(1.0)))
    """Discount of a reward per scored token between it and the token that it is credited to."""

    normalize: Literal["none", "batch"] = field(default="batch", validator=in_(("none", "batch")))
    """Normalization over all scored tokens of the `batch`, to mean 0 and standard deviation 1, or `none`."""


@frozen(kw_only=True)
class ReverseKlOptions(TokenOptions):
    """Options of `reverse_kl`."""

    gamma: float = field(default=0.0, validator=and_(ge(0.0), le(1.0)))
    """Discount of later tokens' differences and rewards: 0 credits a token with its own alone."""

    normalize: Literal["none", "batch"] = field(default="none", validator=in_(("none", "batch")))
    """Normalization over all scored tokens of the `batch`, to mean 0 and standard deviation 1, or `none`."""

    reward_coef: float = field(default=0.0, validator=[ge(0), lt(float("inf"))])
    """Factor of the rewards, which are added to the differences."""


@frozen(kw_only=True)
class GaeOptions(TokenOptions):
    """Options of `gae`."""

    lam: float = field(default=1.0, validator=and_(ge(0.0), le(1.0)))
    """Weight of longer returns against values: 1 takes returns as they are, 0 one-step differences."""
