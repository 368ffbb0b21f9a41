"""Ties: the one rule that says which rewards of a group are the same. Advantages, group filters and metrics share it. No torch."""

from typing import Final

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.values.ragged import IntArray

TIE: Final = 1e-12
"""Difference of two totals that is rounding and not a better attempt, as a share of their group's largest absolute reward.

A sum of a thousand turns' rewards in float64 is off by at most 1.2e-13 of them; 10.1 + 0.2 and 10.3 differ by 1.7e-16 of it.
"""

FloatArray = npt.NDArray[np.float64]


def are_tied(low: float, high: float, largest: float) -> bool:
    """Say if two totals are a tie in a group whose largest absolute reward is `largest`."""
    return bool(high - low <= TIE * largest)


def equalize_ties(totals: FloatArray, largest: FloatArray, groups: IntArray | None = None) -> FloatArray:
    """float64[R]: `totals`, where those of a group that are a tie are the same number, the least of them.

    `largest` float64[R] are the largest absolute rewards of the attempts, of one turn or in total; `groups` int64[R] number their groups from
    0 (None: all are one group). Totals are a tie with their neighbours in rising order, so that their order in `totals` changes nothing.
    """
    if not len(totals):
        return totals.copy()
    numbers = np.zeros(len(totals), dtype=np.int64) if groups is None else groups
    of_groups = np.zeros(int(numbers.max()) + 1)
    np.maximum.at(of_groups, numbers, np.maximum(largest, np.abs(totals)))
    order = np.lexsort((totals, numbers))
    ordered, owners = totals[order], numbers[order]
    begins = np.ones(len(totals), dtype=np.bool_)
    begins[1:] = (owners[1:] != owners[:-1]) | (ordered[1:] - ordered[:-1] > TIE * of_groups[owners[1:]])
    equal = np.empty_like(totals)
    equal[order] = ordered[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    return equal
