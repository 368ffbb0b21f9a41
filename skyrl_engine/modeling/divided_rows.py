"""Rows of embeddings, and experts, that ranks divide: which numbers of a batch are this rank's."""

from typing import Any

import torch
from torch import Tensor


def number_own(numbers: Tensor, first: int, count: int, *, foreign_as: int = 0) -> tuple[Tensor, Tensor]:
    """Return numbers (int64, any shape) counted from this rank's `first`, and a bool mask of those that are other ranks'.

    This rank has `count` of them; those of other ranks become `foreign_as`.
    """
    places = numbers - first
    foreign = (places < 0) | (places >= count)
    return torch.where(foreign, foreign_as, places), foreign


def goes_by_tokens(experts: Any) -> bool:
    """Return True where only experts that tokens go to are computed, one after another, as transformers does without a grouped product."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) not in ("grouped_mm", "batched_mm")


def stand_in_for_foreign(experts: Any, own: int) -> int:
    """Return the number by which a rank that holds `own` experts tells them of those of other ranks, whose shares are zero.

    Grouped products skip the number that counts the experts. Code that goes by tokens may not know it (gpt-oss), so that a token of another
    rank's expert goes to the first one there, for nothing.
    """
    return 0 if goes_by_tokens(experts) else own
