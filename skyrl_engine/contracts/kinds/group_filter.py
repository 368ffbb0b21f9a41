"""Group filter: decides from a group's rewards whether it is worth training on. No torch."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import define, frozen

FloatArray = npt.NDArray[np.float64]


@frozen(eq=False)
class GroupView:
    """What a filter sees of a group of G attempts that did not fail: no tokens.

    `rewards` float64[G]; `success` bool[G], False where nobody says; `lengths` int64[G] sampled tokens; `truncated` bool[G]; `staleness` the
    steps between the weights that started the group and those it would train.
    """

    environment: str
    rewards: FloatArray
    success: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]
    staleness: int = 0


class GroupFilter(Protocol):
    """The product of `skyrl_engine_make_group_filter`: a pure function."""

    def __call__(self, group: GroupView) -> str | None:
        """None keeps the group; a short text drops it, and is the reason under which it is counted."""


@define
class FunctionGroupFilter:
    """A filter made of a plain function and its config; the product of the `group_filter` decorator."""

    name: str
    function: Callable[..., str | None]
    config: object

    def __call__(self, group: GroupView) -> str | None:
        return self.function(group, self.config)
