"""The reducer `median_of_groups`."""

import numpy as np
import numpy.typing as npt
from attrs import define, field
from attrs.validators import in_

from skyrl_engine import BatchStructure, DataError, reducer
from skyrl_engine.contracts import EmptySequence


@define
class MedianOfGroupsConfig:
    empty_sequence: EmptySequence = field(default="count", validator=in_(("count", "skip")))
    """A response without a loss-carrying token, and a group of only such responses: `count` it among responses and groups, or `skip` it."""


@reducer(config=MedianOfGroupsConfig)
def median_of_groups(structure: BatchStructure, config: MedianOfGroupsConfig) -> npt.NDArray[np.float64]:
    """The weight w / (G n_g M_g), float64[A]: loss weight w, G groups, n_g responses in the token's group, M_g the median of their masses.

    The mass of a response is the sum of its loss weights, which is its length where weights are 1. The median is over responses with a
    mass above 0. Raises DataError where the data has no group ids.
    """
    if not structure.grouped:
        raise DataError(
            "the data has no group ids, and the reducer 'median_of_groups' takes medians over groups",
            remedy="Give every sample a group id (group_ids), or choose the reducer 'sequence_mean_token_sum_norm'",
        )
    names, group = np.unique(structure.group_ids, return_inverse=True)
    filled = ~structure.empty
    counted = filled if config.empty_sequence == "skip" else np.ones(len(structure), dtype=np.bool_)
    responses = np.bincount(group[counted], minlength=len(names))
    medians = np.ones(len(names))
    for each in np.unique(group[filled & (structure.mass > 0)]):
        medians[each] = np.median(structure.mass[filled & (group == each)])
    denominators = np.count_nonzero(responses) * responses * medians
    denominators[denominators == 0] = 1.0
    weights: npt.NDArray[np.float64] = structure.loss_weight / denominators[group][structure.sequence_index]
    return weights
