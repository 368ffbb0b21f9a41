"""Group filter: decides from a group's rewards whether it is worth training on. No torch."""

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from skyrl_engine.contracts.values.ties import equalize_ties
from skyrl_engine.errors import ResultError

FloatArray = npt.NDArray[np.float64]

FAILED: Final = "failed"
"""Reason under which groups are counted of which too many attempts failed; no filter may use it."""

LONGEST_REASON: Final = 60


def _equalize(rewards: FloatArray) -> FloatArray:
    totals = np.asarray(rewards, dtype=np.float64)
    return equalize_ties(totals, np.abs(totals))


@frozen(eq=False)
class GroupView:
    """A group of G attempts that did not fail, as a filter sees it: no tokens.

    `rewards` float64[G], of which those that are a tie (`contracts.values.ties`) are the same number, as estimators see them; `success`
    bool[G], False where nobody says; `lengths` int64[G] sampled tokens; `truncated` bool[G]; `staleness` the steps between the weights that
    started the group and those it would train.
    """

    environment: str
    rewards: FloatArray = field(converter=_equalize)
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


def as_drop_reason(label: str, answer: object) -> str | None:
    """Take what a filter returned: None, or one short line of text; `label` names the filter in errors. Raises ResultError."""
    if answer is None:
        return None
    if not isinstance(answer, str) or not answer.strip() or len(answer) > LONGEST_REASON or not answer.isprintable():
        raise ResultError(
            f"{label} answered {answer!r:.80}",
            remedy=f"Return None to keep a group, or a reason to drop it: one line of at most {LONGEST_REASON} characters",
        )
    if answer == FAILED:
        raise ResultError(f"{label} gave the reason {FAILED!r}, which is that of failed attempts", remedy="Choose another word")
    return answer
