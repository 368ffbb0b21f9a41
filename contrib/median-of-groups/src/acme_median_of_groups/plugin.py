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
    """Whether responses without a loss-carrying token are counted among a group's responses, and groups of only such among the groups."""


@reducer(config=MedianOfGroupsConfig)
def median_of_groups(structure: BatchStructure, config: MedianOfGroupsConfig) -> npt.NDArray[np.float64]:
    """float64[A]: w / (G n_g M_g), for the loss weight w, G groups, n_g responses of the token's group, and the median M_g of their masses.

    A mass is the sum of a response's loss weights, its length where weights are 1; the median is over responses that have any. Raises
    DataError where the data has no group ids.
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
