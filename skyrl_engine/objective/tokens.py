"""The tokens that a loss or a correction is given: its declared needs and nothing else, flat, without padding."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import Factory, frozen

from skyrl_engine.contracts.kinds.loss import LossTokens, Pairs, Sequences
from skyrl_engine.contracts.kinds.needs import DIVERGENCE, ROLE_NEED, column_of, model_score
from skyrl_engine.contracts.values.pairs import pair_places
from skyrl_engine.contracts.values.roles import ROLE, ROLES, Role
from skyrl_engine.errors import DataError
from skyrl_engine.objective.behind import to_device
from skyrl_engine.objective.samples import ScoredSamples

if TYPE_CHECKING:
    from skyrl_engine.contracts.values.ragged import AnyArray, IntArray


@frozen(eq=False)
class MicroBatchTokens:
    """The n scored tokens of a micro-batch. `scores` are the model's, [n] by name; `seed` and `step` seed generators with the sample ids.

    `bound` names columns that are scores of this very pass: each is the score it names, detached.
    """

    scores: Mapping[str, torch.Tensor]
    samples: ScoredSamples
    seed: int
    step: int
    bound: Mapping[str, str] = Factory(dict)

    @property
    def like(self) -> torch.Tensor:
        """Some score [n]: of the number, type and device of everything next to it."""
        some = next(iter(self.scores.values()))
        return some if some.ndim == 1 else some[:, 0]

    def of_samples(self, samples: "IntArray") -> "MicroBatchTokens":
        """The tokens of the chosen samples (positions, ascending), detached."""
        index = self._to_device(np.flatnonzero(np.isin(self.samples.sequence_index, samples)))
        scores = {name: score.detach()[index] for name, score in self.scores.items()}
        return MicroBatchTokens(scores, self.samples.take(samples), self.seed, self.step, self.bound)

    def for_loss(
        self, label: str, needs: tuple[str, ...], index: int, *, pairs: bool = False, on: Role | None = None
    ) -> LossTokens:
        """All tokens for a loss, or those of the samples of one role. `part` is its place in the objective: two parts that draw random numbers
        draw different ones. `pairs` says that the loss compares the two samples of a unit.

        Raises DataError, with `label`, for a column or for roles that the data lacks, and for a unit that is no pair.
        """
        kept = None if on is None else self.places_in_role(label, on)
        values = {_key(name): self._need(label, name) for name in needs if name != ROLE_NEED}
        if kept is not None:
            values = {name: value.index_select(0, kept) for name, value in values.items()}
        if pairs or ROLE_NEED in needs:
            self._roles(label)
        sequences = self.sequences(kept)
        return LossTokens(values, sequences, lambda: self._generator(index), self._pairs(label, sequences) if pairs else None)

    def places_in_role(self, label: str, role: Role) -> torch.Tensor:
        """int64[m]: the tokens of samples of this role. Raises DataError where samples have no roles."""
        return self._to_device(np.flatnonzero((self._roles(label) == ROLES[role])[self.samples.sequence_index]))

    def for_correction(self, label: str, needs: tuple[str, ...], index: int, kept: torch.Tensor | None) -> LossTokens:
        """The tokens at the places `kept` int64[m] (None: all), detached, their sequences counted without the others: what a correction
        is given.
        """
        values = {_key(name): self._need(label, name).detach() for name in needs}
        if kept is not None:
            values = {name: value.index_select(0, kept) for name, value in values.items()}
        return LossTokens(values, self.sequences(kept), lambda: self._generator(index))

    def sequences(self, kept: torch.Tensor | None) -> Sequences:
        """The S sequences, all of them also where nothing is kept of one."""
        index = self._to_device(self.samples.sequence_index)
        if kept is None:
            counts = self._to_device(self.samples.scored.lengths)
        else:
            index = index.index_select(0, kept)
            # not bincount, which reads the largest number first
            counts = index.new_zeros(len(self.samples.sample_ids)).index_add(0, index, torch.ones_like(index))
        roles = None if self.samples.roles is None else self._to_device(self.samples.roles)
        return Sequences(index, counts, self._to_device(self.samples.unit_ids), self._to_device(self.samples.group_ids), roles)

    def _roles(self, label: str) -> "IntArray":
        if self.samples.roles is None:
            raise DataError(
                f"{label} needs to know chosen from rejected samples, and the samples have no value {ROLE!r}",
                remedy='Train on preferences (trainer = "preference"), or give every sample a role: 0 for chosen, 1 for rejected',
            )
        return self.samples.roles

    def _pairs(self, label: str, sequences: Sequences) -> Pairs:
        samples = self.samples
        # paired on the host, so that no device waits
        places = pair_places(samples.unit_ids, self._roles(label), samples.scored.lengths, samples.sample_ids)
        return Pairs.of(sequences, self._to_device(places))

    def _need(self, label: str, need: str) -> torch.Tensor:
        if model_score(need):
            return self.scores[need]
        name = column_of(need)
        if name in self.bound:
            return self.scores[self.bound[name]].detach()
        columns = self.samples.columns
        if name not in columns:
            raise DataError(
                f"{label} needs the column {name!r}, the data has {', '.join(sorted(columns)) or 'none'}",
                remedy="Provide the column or choose a loss that does not need it",
            )
        return self.column(name)

    def column(self, name: str) -> torch.Tensor:
        """A column that the samples have, [n] or [n, k] of the scores' type; integers stay int64."""
        values = self.samples.columns[name]
        dtype = torch.int64 if values.dtype.kind == "i" else self.like.dtype
        return to_device(torch.from_numpy(values), self.like.device, dtype)

    def _to_device(self, array: "AnyArray") -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.like.device)

    def _generator(self, index: int) -> torch.Generator:
        entropy = [self.seed, self.step, index, *self.samples.sample_ids.tolist()]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
        return torch.Generator(self.like.device).manual_seed(seed)


def _key(need: str) -> str:
    """The name under which a loss finds a need: its own, `divergence`, or that of the column."""
    score = model_score(need)
    if score == DIVERGENCE:
        return DIVERGENCE
    return need if score else column_of(need)
