"""The parts of attempts' rewards, such as those of several reward functions, on their way to the estimator that reads them."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.rollout import Trajectory
from skyrl_engine.errors import DataError

FloatArray = npt.NDArray[np.float64]
_PREFIX: Final = "reward_part:"
_WHOLE: Final = "reward"
"""Name of the environment's own part where it shows none."""
_ROUNDING: Final = 1e-6


def parts_by_sample(
    columns: SampleColumns, attempts: Sequence[Trajectory], added: AbstractSet[str] = frozenset()
) -> dict[str, FloatArray]:
    """Return sample values float64[N], one per part that any of the attempts has; NaN where an attempt has it not.

    `attempts` are numbered by `columns.trajectory_ids`; `added` names the parts that reward models gave. Raises DataError for an attempt whose
    parts do not add up to its reward.
    """
    parts_of = [_parts_of(attempt, added) for attempt in attempts]
    names = sorted({name for parts in parts_of for name in parts})
    of_attempts = {name: np.array([parts.get(name, math.nan) for parts in parts_of], dtype=np.float64) for name in names}
    return {f"{_PREFIX}{name}": values[columns.trajectory_ids] for name, values in of_attempts.items()}


def parts_in(columns: SampleColumns) -> dict[str, FloatArray]:
    """Return what `parts_by_sample` added, by the names of parts."""
    return {
        name.removeprefix(_PREFIX): values.astype(np.float64)
        for name, values in columns.sample_values.items()
        if name.startswith(_PREFIX)
    }


def _parts_of(attempt: Trajectory, added: AbstractSet[str]) -> Mapping[str, float]:
    if attempt.parts.keys() <= added:
        return {_WHOLE: attempt.reward - math.fsum(attempt.parts.values()), **attempt.parts}
    total = math.fsum(attempt.parts.values())
    if abs(total - attempt.reward) > _ROUNDING * max(1.0, *map(abs, attempt.parts.values())):
        raise DataError(
            f"attempt {attempt.member} of group {attempt.ticket} has the reward {attempt.reward:g}, and its parts "
            f"({', '.join(sorted(attempt.parts))}) add up to {total:g}",
            remedy="Let the environment show every summand of the reward in StepResult.parts, or choose an advantage that reads no parts",
        )
    return attempt.parts
