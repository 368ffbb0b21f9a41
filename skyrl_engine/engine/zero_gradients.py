"""Samples whose gradient is known to be 0 before any pass: told from the columns, by what the parts of the objective declare."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.kinds.loss import compares_pairs
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.engine.assembly import Assembly

ADVANTAGES = "advantages"


class Work(IntEnum):
    """The work of a step on a sample, the most first."""

    GRADIENT = 0
    SCORES = 1
    """The gradient is 0, and metrics and outputs are still about its tokens."""
    NOTHING = 2
    """No token carries loss, so that nothing reads what the model makes of it."""


def find_work(columns: SampleColumns, assembly: Assembly) -> IntArray:
    """int64[N]: the `Work` of each sample. All of them have a gradient where a part of the objective may read more than the sample alone.

    Otherwise a sample has none if no token of it carries loss, or if all its advantages are 0 and every loss is homogeneous in them. Attempts
    and units are learned from as a whole: where one sample of them has a gradient, all of them count as having one.
    """
    work = np.zeros(len(columns), dtype=np.int64)
    if not _stands_alone(assembly):
        return work
    carries = columns.loss_weight != 0
    advantages = columns.columns.get(ADVANTAGES)
    if advantages is not None and advantages.ndim == 1 and _is_homogeneous(assembly):
        # NaN is not 0
        work[~_any_token(carries & (advantages != 0), columns)] = Work.SCORES
    work[~_any_token(carries, columns)] = Work.NOTHING
    if work.any():
        for labels in (columns.trajectory_ids, columns.unit_ids):
            work = _smallest_of_label(work, labels)
    return work


def _stands_alone(assembly: Assembly) -> bool:
    """Return True where leaving a sample out changes no other's weights, losses or gradient.

    Corrections may draw random numbers by micro-batch, and declare that nowhere. Losses of pairs may count pairs without a token.
    """
    objective = assembly.objective
    return not (
        objective.corrections
        or assembly.description.means_over_step
        or assembly.batch_local
        or any(compares_pairs(part.product) for part in objective.losses)
    )


def _is_homogeneous(assembly: Assembly) -> bool:
    """Return True where advantages of 0 give every part of the objective the value and the gradient 0."""
    return all(part.product.homogeneous and ADVANTAGES in part.product.needs for part in assembly.objective.losses)


def _any_token(true: npt.NDArray[np.bool_], columns: SampleColumns) -> npt.NDArray[np.bool_]:
    """bool[N]: the samples with a token for which `true` bool[A] holds."""
    before = np.concatenate([[0], np.cumsum(true)])[columns.action_offsets]
    return np.diff(before) > 0


def _smallest_of_label(values: IntArray, labels: IntArray) -> IntArray:
    """int64[N]: each sample gets the smallest of `values` of all samples with its label."""
    names, index = np.unique(labels, return_inverse=True)
    smallest = np.full(len(names), max(Work), dtype=np.int64)
    np.minimum.at(smallest, index, values)
    return smallest[index]
