"""The scored tokens of a micro-batch: what the objective needs in addition to the model's scores. NumPy, made on the rank from its shard."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, offsets_of


@frozen(eq=False)
class ScoredSamples:
    """S samples with n scored tokens, flat in sample order.

    `scored` int32 [n] with offsets [S+1] is each token's place on its sample's action axis, `action_lengths` int64[S] that axis' length;
    `columns` by name, float32[n], or [n, k] of float32 or integers; `weights` float64[n] the reducer's; `sample_ids`, `group_ids`, `unit_ids`
    int64[S]. `roles` int64[S] say which half of a preference a sample is; None where samples have no roles. `sources` int64[S] number the
    dataset or environment that a sample is from; None where there is one. `carrying` bool[n] says which
    tokens carry loss; None where all of them do.
    """

    sample_ids: IntArray
    group_ids: IntArray
    unit_ids: IntArray
    action_lengths: IntArray
    scored: Ragged
    columns: Mapping[str, AnyArray]
    weights: npt.NDArray[np.float64]
    roles: IntArray | None = None
    sources: IntArray | None = None
    carrying: npt.NDArray[np.bool_] | None = None

    @property
    def sequence_index(self) -> IntArray:
        """int64[n]: the sample of every scored token."""
        return np.repeat(np.arange(len(self.sample_ids), dtype=np.int64), self.scored.lengths)

    def take(self, samples: IntArray) -> "ScoredSamples":
        """The chosen samples (positions, ascending) with their tokens, all of which carry loss."""
        assert self.carrying is None, "tokens without loss were left out"
        chosen = np.zeros(len(self.sample_ids), dtype=np.bool_)
        chosen[samples] = True
        of_tokens = chosen[self.sequence_index]
        return ScoredSamples(
            sample_ids=self.sample_ids[samples],
            group_ids=self.group_ids[samples],
            unit_ids=self.unit_ids[samples],
            action_lengths=self.action_lengths[samples],
            scored=self.scored.take(samples),
            columns={name: values[of_tokens] for name, values in self.columns.items()},
            weights=self.weights[of_tokens],
            roles=None if self.roles is None else self.roles[samples],
            sources=None if self.sources is None else self.sources[samples],
        )

    @property
    def of_loss(self) -> "ScoredSamples":
        """The same samples with the tokens that carry loss alone."""
        if self.carrying is None:
            return self
        counts = np.bincount(self.sequence_index[self.carrying], minlength=len(self.sample_ids))
        return evolve(
            self,
            scored=Ragged(self.scored.values[self.carrying], offsets_of(counts)),
            columns={name: values[self.carrying] for name, values in self.columns.items()},
            weights=self.weights[self.carrying],
            carrying=None,
        )
