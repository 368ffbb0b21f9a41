"""Entry points of the reducers.

In formulas, w is a token's loss weight, M the sum of all w of the mini-batch over every rank, and [x] is x, or 1 where x is 0.
"""

import numpy as np
import numpy.typing as npt
from attrs import field, frozen
from attrs.validators import in_

from skyrl_engine import BatchStructure, reducer
from skyrl_engine.contracts.reducer import EmptySequence


@frozen
class MeanConfig:
    """`empty_sequence` says whether means over sequences count one in which every loss weight is 0.

    A mean over tokens counts no sequences and is the same either way; the option lets a config switch between means freely.
    """

    empty_sequence: EmptySequence = field(default="count", validator=in_(("count", "skip")))


@reducer(negative_weights=True)
def sum_reducer(structure: BatchStructure, _config: None) -> npt.NDArray[np.float64]:
    """The weight w itself, unchanged: the caller normalises."""
    return structure.loss_weight.astype(np.float64)


@reducer(config=MeanConfig)
def token_mean(structure: BatchStructure, _config: MeanConfig) -> npt.NDArray[np.float64]:
    """The weight w / [M]: every loss-carrying token of the mini-batch counts alike, whatever its sequence, micro-batch or rank."""
    total = structure.mass.sum()
    return structure.loss_weight.astype(np.float64) / (total or 1.0)
