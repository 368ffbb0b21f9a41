"""Batches of losses and corrections, and what promises do with one: a cut, another order, other names. They describe themselves in words."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, offsets_of, segment_indices
from skyrl_engine.objective.samples import ScoredSamples


@frozen(eq=False)
class TokenBatch:
    """S sequences with n loss-carrying tokens, flat. `values` float32[n] by need, [n, k] of those that are wide; `weights` float64[n] as a
    reducer gives them.

    `lengths`, `sample_ids`, `group_ids` and `unit_ids` are int64[S]; a sequence without a token that carries loss has length 0.
    `roles` int64[S] tell chosen from rejected sequences where the needs ask for it; then units are pairs.
    """

    lengths: IntArray
    values: Mapping[str, AnyArray]
    weights: npt.NDArray[np.float64]
    sample_ids: IntArray
    group_ids: IntArray
    unit_ids: IntArray
    roles: IntArray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def sequence_index(self) -> IntArray:
        """Return int64[n]: the sequence of every token."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def places(self, sequences: Sequence[int]) -> IntArray:
        """Return the positions of these sequences' tokens, in the order of the sequences."""
        return segment_indices(offsets_of(self.lengths), np.asarray(sequences, dtype=np.int64))

    def take(self, sequences: Sequence[int]) -> "TokenBatch":
        """Return the chosen sequences in the chosen order; weights stay those of the whole batch."""
        chosen = np.asarray(sequences, dtype=np.int64)
        places = self.places(sequences)
        return TokenBatch(
            self.lengths[chosen],
            {name: values[places] for name, values in self.values.items()},
            self.weights[places],
            self.sample_ids[chosen],
            self.group_ids[chosen],
            self.unit_ids[chosen],
            None if self.roles is None else self.roles[chosen],
        )

    def with_values(self, **values: AnyArray) -> "TokenBatch":
        return evolve(self, values={**self.values, **values})

    def with_drift(self, nats: float) -> "TokenBatch | None":
        """Return the batch with the other policies' log-probabilities lowered; None where no need is one of them."""
        others = {name: values - np.float32(nats) for name, values in self.values.items() if name.endswith("_logprobs")}
        return self.with_values(**others) if others else None

    def micro_batch(self) -> MicroBatch:
        """Return the micro-batch that a backend gives to the objective, without the model's inputs."""
        import torch

        samples = ScoredSamples(
            sample_ids=self.sample_ids,
            group_ids=self.group_ids,
            unit_ids=self.unit_ids,
            action_lengths=self.lengths,
            scored=Ragged(
                np.concatenate([np.zeros(0, np.int32), *(np.arange(length, dtype=np.int32) for length in self.lengths)]),
                offsets_of(self.lengths),
            ),
            columns={name: values.copy() for name, values in self.values.items()},
            weights=self.weights,
            roles=self.roles,
        )
        nothing = torch.zeros(0, dtype=torch.int64)
        return MicroBatch({}, nothing, nothing, Ragged.from_list([], np.int64), samples)

    def __str__(self) -> str:
        shape = f"{len(self)} sequence{'' if len(self) == 1 else 's'} of {_format_values(self.lengths)} loss-carrying tokens"
        paired = [f"units {_format_values(self.unit_ids)}"] if len(np.unique(self.unit_ids)) < len(self) else []
        return "\n".join([shape, *paired, *(f"{name} {_format_values(values.ravel())}" for name, values in self.values.items())])


_MOST_NUMBERS = 24
"""Numbers that a counterexample spells out."""


def _format_values(values: Iterable[float]) -> str:
    numbers = [f"{value:g}" for value in values]
    more = [f"... ({len(numbers)} in all)"] if len(numbers) > _MOST_NUMBERS else []
    return ", ".join(numbers[:_MOST_NUMBERS] + more) or "none"


@frozen(eq=False)
class CutBatch:
    """A batch, and the sequences of each of its micro-batches."""

    batch: TokenBatch
    parts: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        cut = " | ".join(", ".join(map(str, part)) or "none" for part in self.parts)
        return f"{self.batch}\nmicro-batches of the sequences {cut}"


@frozen(eq=False)
class ReorderedBatch:
    """A batch, and another order of its sequences."""

    batch: TokenBatch
    order: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.batch}\nin the order {_format_values(self.order)}"


@frozen(eq=False)
class FilledBatch:
    """A batch, and the positions of its sequences among `total`; the other sequences have no token that carries loss."""

    batch: TokenBatch
    places: tuple[int, ...]
    total: int

    @property
    def filled(self) -> TokenBatch:
        """Return the batch with the other sequences in between."""
        count = len(self.batch)
        lengths = np.zeros(self.total, dtype=np.int64)
        lengths[list(self.places)] = self.batch.lengths
        ids = np.full((3, self.total), -1, dtype=np.int64)
        ids[:, list(self.places)] = (self.batch.sample_ids, self.batch.group_ids, self.batch.unit_ids)
        others = np.flatnonzero(ids[0] == -1)
        ids[:, others] = 1_000 + count + np.arange(len(others))
        roles = None
        if self.batch.roles is not None:
            roles = np.zeros(self.total, dtype=np.int64)
            roles[list(self.places)] = self.batch.roles
        return evolve(self.batch, lengths=lengths, sample_ids=ids[0], group_ids=ids[1], unit_ids=ids[2], roles=roles)

    def __str__(self) -> str:
        return f"{self.batch}\nwith {self.total - len(self.batch)} sequences more that have none"


@frozen(eq=False)
class WornBatch:
    """A cut batch, and the number of its micro-batches that a product has seen before."""

    cut: CutBatch
    calls: int

    def __str__(self) -> str:
        return f"{self.cut}" + (f"\nafter {self.calls} calls" if self.calls else "")


@frozen(eq=False)
class RelabelledBatch:
    """A batch, and other names of its groups and units."""

    batch: TokenBatch
    names: IntArray

    @property
    def relabelled(self) -> TokenBatch:
        batch = self.batch
        return evolve(batch, group_ids=self.names[batch.group_ids], unit_ids=self.names[batch.unit_ids])

    def __str__(self) -> str:
        return f"{self.batch}\nwith the groups named {_format_values(self.relabelled.group_ids)}"
