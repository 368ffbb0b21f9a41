"""The scored tokens of a micro-batch: what the objective needs besides the model's scores. NumPy, made on the rank from its shard."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged


@frozen(eq=False)
class ScoredSamples:
    """S samples with n scored tokens, flat in sample order.

    `scored` int32 [n] with offsets [S+1] is each token's place on its sample's action axis, `action_lengths` int64[S] that axis' length;
    `columns` by name, float32[n], or [n, k] of float32 or integers; `weights` float64[n] the reducer's; `sample_ids`, `group_ids`, `unit_ids`
    int64[S]. `roles` int64[S] say which half of a preference a sample is; None where samples have no roles.
    """

    sample_ids: IntArray
    group_ids: IntArray
    unit_ids: IntArray
    action_lengths: IntArray
    scored: Ragged
    columns: Mapping[str, AnyArray]
    weights: npt.NDArray[np.float64]
    roles: IntArray | None = None

    @property
    def sequence_index(self) -> IntArray:
        """int64[n]: the sample of every scored token."""
        return np.repeat(np.arange(len(self.sample_ids), dtype=np.int64), self.scored.lengths)
