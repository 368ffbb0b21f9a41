"""The objective by definition: one sample after the other through the plain transformers model, in float64, token by token.

It is what passes through the engine are compared with. Nothing of the engine that collates, cuts, gathers, scores, dispatches, weighs, sums
or merges runs in here, so a mistake that all cuts share does not agree with it. Losses, corrections and reducers are called: they are what
is given, and the conformance kit is about them.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.contracts.kinds.loss import as_loss_output, compares_pairs
from skyrl_engine.contracts.kinds.reducer import BatchStructure, Reducer
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import BatchOutput
from skyrl_engine.contracts.values.pairs import roles_in
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.objective.behind import Later
from skyrl_engine.objective.corrections import correct
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.objective.tokens import MicroBatchTokens
from skyrl_engine.proof.comparison import Gradients, Measurement
from skyrl_engine.proof.diagnosis import Pieces
from skyrl_engine.proof.plain_model import PlainModel
from skyrl_engine.registry.owner import blame


@frozen(eq=False)
class BatchDefinition:
    """A batch by definition.

    `values` are the parts of the objective by name, [n] over the scored tokens, coefficient and factor included; `weights` float64[n];
    `sequence` and `place` say of each token which sample it is of, and where it is in its response.
    """

    columns: SampleColumns
    parameters: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    weights: Tensor
    sequence: Sequence[int]
    place: Sequence[int]

    @classmethod
    def of(
        cls,
        model: PlainModel,
        columns: SampleColumns,
        parts: ObjectiveParts,
        reducer: Reducer,
        *,
        longest: int | None,
        seed: int,
        step: int,
        teacher: PlainModel | None = None,
    ) -> Self:
        """`longest` is the maximum length that reducers get, `seed` and `step` what random losses get; `teacher` is compared with."""
        sequence: list[int] = []
        place: list[int] = []
        at: list[int] = []
        scores: dict[str, list[Tensor]] = {}
        for sample in range(len(columns)):
            first, last = (int(columns.token_offsets[sample + end]) for end in (0, 1))
            start, stop = (int(columns.action_offsets[sample + end]) for end in (0, 1))
            prompt = (last - first) - (stop - start)
            if last - first < 2 or not columns.loss_weight[start:stop].any():
                continue
            candidates = {
                name: torch.from_numpy(np.concatenate([np.zeros((prompt, values.shape[1]), np.int64), values[start:stop]])[1:])
                for name, values in columns.columns.items()
                if values.dtype.kind == "i"
            }
            result = model.scores(
                torch.from_numpy(columns.input_ids[first:last].astype(np.int64)),
                candidates=candidates,
                teacher=teacher,
                needs=parts.scores,
            )
            for action in range(stop - start):
                if columns.loss_weight[start + action] == 0:
                    continue
                sequence.append(sample)
                place.append(action)
                at.append(start + action)
                for name, values in result.items():
                    scores.setdefault(name, []).append(values[prompt + action - 1])
        stacked = {name: torch.stack(values) for name, values in scores.items()}
        weights = reducer.weights(_structure(columns, longest))[at]
        tokens = MicroBatchTokens(stacked, _make_scored_samples(columns, sequence, place, at, weights), seed, step)
        return cls(columns, model.parameters, _values(parts, tokens), torch.from_numpy(weights), sequence, place)

    @cached_property
    def token_loss(self) -> Tensor:
        """[n]: all parts of the objective together, unweighted."""
        return torch.stack(list(self.values.values())).sum(0)

    @property
    def measured(self) -> Measurement:
        """Loss, gradient and token losses."""
        token_loss = self.token_loss
        weighed = self.weights * token_loss
        counts = np.bincount(np.asarray(self.sequence, dtype=np.int64), minlength=len(self.columns))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        output = BatchOutput(
            self.columns.sample_ids,
            np.diff(self.columns.action_offsets),
            Ragged(np.asarray(self.place, dtype=np.int32), offsets),
            {"token_loss": Ragged(token_loss.detach().float().numpy(), offsets)},
        )
        return Measurement(weighed.sum().item(), weighed.detach().abs().sum().item(), self._gradients(weighed.sum()), output)

    @cached_property
    def by_part(self) -> Pieces:
        """The gradient of each part of the objective."""
        gradients = [self._gradients((self.weights * value).sum()) for value in self.values.values()]
        return Pieces(list(self.values), gradients, np.ones(len(gradients)))

    @cached_property
    def by_sample(self) -> Pieces:
        """The gradient of each sample, and its share of the weights."""
        weighed, owner = self.weights * self.token_loss, torch.tensor(self.sequence)
        mine = [owner == sample for sample in range(len(self.columns))]
        return Pieces(
            [str(sample) for sample in self.columns.sample_ids],
            [self._gradients(weighed[own].sum()) for own in mine],
            np.array([self.weights[own].abs().sum().item() for own in mine]),
        )

    def _gradients(self, total: Tensor) -> Gradients:
        """Return gradients by parameter; a parameter that no part of the objective depends on has none."""
        everything = self.token_loss.sum()
        used = torch.autograd.grad(everything, list(self.parameters.values()), retain_graph=True, allow_unused=True)
        named = {name: tensor for (name, tensor), reached in zip(self.parameters.items(), used, strict=True) if reached is not None}
        gradients = torch.autograd.grad(total, list(named.values()), retain_graph=True, allow_unused=True)
        return {
            name: np.zeros(tensor.shape) if gradient is None else gradient.numpy()
            for (name, tensor), gradient in zip(named.items(), gradients, strict=True)
        }


def _values(parts: ObjectiveParts, tokens: MicroBatchTokens) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for number, term in enumerate(parts.losses):
        needed = tokens.for_loss(term.label, term.product.needs, number, pairs=compares_pairs(term.product), on=term.on)
        with blame(term.owner, "its call"):
            returned = term.product(needed)
        value = as_loss_output(term.label, returned, len(needed.sequences.index)).token_loss
        if term.on is not None:
            own = dict(zip(tokens.places_in_role(term.label, term.on).tolist(), value, strict=True))
            value = torch.stack([own.get(token, value.new_zeros(())) for token in range(len(tokens.like))])
        if term is parts.main:
            if parts.corrections:
                later = Later(tokens.like.device)
                factors, _ = correct(parts.corrections, tokens, later, first_index=len(parts.losses))
                later.raise_now()
                value = torch.where(factors == 0, 0.0, factors * value)
            values[term.name] = value
        else:
            values[f"term {term.name}"] = term.coefficient * value
    return values


def _structure(columns: SampleColumns, longest: int | None) -> BatchStructure:
    """The batch as one micro-batch, in its own order."""
    return BatchStructure(
        loss_weight=columns.loss_weight,
        action_offsets=columns.action_offsets,
        group_ids=columns.group_ids,
        unit_ids=columns.unit_ids,
        micro_batch=np.zeros(len(columns), dtype=np.int64),
        max_sequence_length=longest,
        sample_ids=columns.sample_ids,
        grouped=columns.grouped,
        columns=columns.columns,
        sample_values=columns.sample_values,
    )


def _make_scored_samples(
    columns: SampleColumns, sequence: Sequence[int], place: Sequence[int], at: Sequence[int], weights: npt.NDArray[np.float64]
) -> ScoredSamples:
    counts = [sequence.count(sample) for sample in range(len(columns))]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ScoredSamples(
        sample_ids=columns.sample_ids,
        group_ids=columns.group_ids,
        unit_ids=columns.unit_ids,
        action_lengths=np.diff(columns.action_offsets),
        scored=Ragged(np.asarray(place, dtype=np.int32), offsets),
        columns={name: values[list(at)] for name, values in columns.columns.items()},
        weights=weights,
        roles=roles_in(columns.sample_values),
    )
