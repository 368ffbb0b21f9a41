"""The place of every token's entropy among those of the whole batch, for what selects tokens by it (the correction `top_entropy`)."""

from typing import Final

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.values.ragged import AnyArray

ENTROPY_QUANTILE: Final = "entropy_quantile"
"""Column float32[A]: the quantile of a token's entropy among all tokens of a step's batch that carry loss; 0 at others."""


def rank_among_scored(entropies: AnyArray, scored: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """Return the quantile of each of `entropies` float[A] among those where `scored` bool[A] holds, float32[A]; 0 elsewhere.

    Of n tokens one has (number of entropies that are not larger - 1) / (n - 1): 1 the largest; equal ones have the same. A token's
    quantile is at least q exactly where its entropy is at least the q-quantile of all, interpolated linearly as `torch.quantile` does.
    """
    among = entropies[scored]
    quantiles = np.zeros(len(entropies), dtype=np.float32)
    if len(among):
        places = np.searchsorted(np.sort(among), among, side="right") - 1
        quantiles[scored] = places / (len(among) - 1) if len(among) > 1 else 1.0
    return quantiles
