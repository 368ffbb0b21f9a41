"""Loss: per-token values over a micro-batch's loss-carrying tokens. Losses never see padding, weights or counts.

The import of this file needs no torch; the methods below use tensor methods only.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import Factory, define, field, frozen

from skyrl_engine.contracts.kinds.needs import LOGPROBS_AT, MODEL_SCORES
from skyrl_engine.contracts.values.outputs import Metric, refuse_other_metrics
from skyrl_engine.contracts.values.pairs import pair_places
from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.errors import ResultError
from skyrl_engine.near_words import find_near_word

if TYPE_CHECKING:
    import torch


@frozen(eq=False)
class Sequences:
    """Boundaries of the S sequences that the n tokens belong to.

    `index` int64[n] is each token's sequence, `counts` int64[S] the loss-carrying tokens per sequence, `unit_ids` and `group_ids` int64[S].
    `roles` int64[S] are 0 for chosen and 1 for rejected sequences; None where the samples have no roles.
    """

    index: "torch.Tensor"
    counts: "torch.Tensor"
    unit_ids: "torch.Tensor"
    group_ids: "torch.Tensor"
    roles: "torch.Tensor | None" = None

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def offsets(self) -> "torch.Tensor":
        """int64[S+1]: sequence s holds tokens offsets[s] to offsets[s + 1] of the n."""
        offsets = self.counts.new_zeros(len(self) + 1)
        offsets[1:] = self.counts.cumsum(0)
        return offsets

    def sum(self, values: "torch.Tensor") -> "torch.Tensor":
        """[S]: sum of `values` [n] over each sequence; 0 for a sequence without tokens."""
        return values.new_zeros(len(self)).index_add(0, self.index, values)

    def mean(self, values: "torch.Tensor") -> "torch.Tensor":
        """[S]: mean of `values` [n] over each sequence; 0 for a sequence without tokens."""
        return self.sum(values) / self.counts.clamp(min=1).to(values.dtype)

    def broadcast(self, values: "torch.Tensor") -> "torch.Tensor":
        """[n]: each token gets its sequence's entry of `values` [S]."""
        return values[self.index]


@frozen(eq=False)
class PairHalf:
    """The chosen, or the rejected, sequence of each of P pairs; `places` int64[P] says which of the S sequences they are."""

    places: "torch.Tensor"
    _sequences: Sequences

    @property
    def counts(self) -> "torch.Tensor":
        """int64[P]: loss-carrying tokens of each."""
        return self._sequences.counts[self.places]

    def sum(self, values: "torch.Tensor") -> "torch.Tensor":
        """[P]: sum of `values` [n] over the tokens of this half."""
        return self._sequences.sum(values)[self.places]

    def mean(self, values: "torch.Tensor") -> "torch.Tensor":
        """[P]: mean of `values` [n] over the tokens of this half; 0 for one without tokens."""
        return self._sequences.mean(values)[self.places]


@frozen(eq=False)
class Pairs:
    """P preference pairs; `index` int64[n] is each token's pair.

    margins = tokens.pairs.chosen.sum(gains) - tokens.pairs.rejected.sum(gains)     [P]
    return tokens.pairs.broadcast(loss_of(margins))                                  [n]
    """

    chosen: PairHalf
    rejected: PairHalf
    index: "torch.Tensor"

    def __len__(self) -> int:
        return len(self.chosen.places)

    def broadcast(self, values: "torch.Tensor") -> "torch.Tensor":
        """[n]: each token gets its pair's entry of `values` [P]."""
        return values[self.index]

    @classmethod
    def of(cls, sequences: Sequences, places: "torch.Tensor | None" = None) -> "Pairs":
        """Pair sequences by unit and role. `places` int64[P, 2] are the pairs' sequences, chosen first, where they are known already.

        Raises DataError for a unit that is not one chosen and one rejected sequence.
        """
        if places is None:
            assert sequences.roles is not None, "sequences without roles make no pairs"
            units, roles, counts = (array.cpu().numpy() for array in (sequences.unit_ids, sequences.roles, sequences.counts))
            places = sequences.index.new_tensor(pair_places(units, roles, counts, np.arange(len(sequences), dtype=np.int64)))
        # numbers every sequence by its pair; one of no pair has no token that would read its number
        of_sequence = sequences.counts.new_zeros(len(sequences))
        of_sequence[places.T.reshape(-1)] = (places.new_ones(len(places)).cumsum(0) - 1).repeat(2)
        return cls(PairHalf(places[:, 0], sequences), PairHalf(places[:, 1], sequences), of_sequence[sequences.index])


class UndeclaredNeedError(AttributeError):
    """A loss or a correction reads tokens of a name that its needs do not declare."""


@frozen(eq=False)
class LossTokens:
    """The n loss-carrying tokens of a micro-batch, flat, in sample order.

    Each need the loss declared is an attribute: a tensor [n], float32 unless the model computes in float64; a column `NAME[k]` is [n, k] under
    its name, and int64 where it holds integers. Scores of the model (`MODEL_SCORES`) are differentiable. `sequences` holds the boundaries,
    `pairs` the two halves of every unit, for a loss with `unit_size = 2`.
    """

    needs: Mapping[str, "torch.Tensor"]
    sequences: Sequences
    make_generator: Callable[[], "torch.Generator"]
    paired: Pairs | None = None
    _made: dict[str, "torch.Generator"] = field(factory=dict, init=False, repr=False)

    def __getattr__(self, name: str) -> "torch.Tensor":
        if name.startswith("_") or name in ("needs", "sequences", "make_generator", "paired"):
            raise AttributeError(name)
        try:
            return self.needs[name]
        except KeyError:
            raise self._explain_missing(name) from None

    @property
    def pairs(self) -> Pairs:
        """The preference pairs that the tokens belong to; only a loss that declares `unit_size=2` is given them."""
        if self.paired is None:
            raise AttributeError("pairs")
        return self.paired

    def logprobs_at(self, column: str) -> "torch.Tensor":
        """[n, k], differentiable: the model's log-probabilities at the token ids of `column`, the need `logprobs_at:COLUMN`."""
        need = f"{LOGPROBS_AT}:{column}"
        if need not in self.needs:
            raise UndeclaredNeedError(
                f"the function reads tokens.logprobs_at({column!r}) but declares needs = {sorted(self.needs)}; add {need!r} to its needs"
            )
        return self.needs[need]

    def _explain_missing(self, name: str) -> AttributeError:
        """Make the error that says what to write in place of a name that is no need, or to declare."""
        reads = f"the function reads tokens.{name}"
        if name == "pairs":
            return AttributeError(f"{reads} and does not declare unit_size=2; write @loss(unit_size=2, ...)")
        near = find_near_word(name, {*MODEL_SCORES, *self.needs, "sequences", "generator"}, cutoff=0.75)
        if near and near not in (name, *self.needs, "sequences", "generator"):
            return AttributeError(f"{reads}; did you mean tokens.{near}? Declare it: needs = {sorted([*self.needs, near])}")
        if near and near != name:
            return AttributeError(f"{reads}; did you mean tokens.{near}?")
        return UndeclaredNeedError(f"{reads} but declares needs = {sorted(self.needs)}; add {name!r} to its needs")

    @property
    def generator(self) -> "torch.Generator":
        """Seeded from run seed, step and the micro-batch's sample ids; equal on every replica of this micro-batch."""
        if "generator" not in self._made:
            self._made["generator"] = self.make_generator()
        return self._made["generator"]


@frozen(eq=False)
class LossOutput:
    """`token_loss` [n] differentiable, and metrics by name, each declaring its own reduction.

    The engine's own names are taken: loss, tokens, grad_norm, ... (`ENGINE_METRICS`), and what starts with `objective/`, `policy/`, ...
    (`ENGINE_PREFIXES`). Metrics of a term appear as `NAME/metric`, with the name of the term's loss.
    """

    token_loss: "torch.Tensor"
    metrics: Mapping[str, Metric] = Factory(dict)


class Loss(Protocol):
    """The product of `skyrl_engine_make_loss`.

    `needs` names model scores and data columns, as `contracts.kinds.needs` says; `reducers` the reducers that make sense for it (None: all),
    `advised_reducers` those its authors meant it for (None: all), others are used with a warning. `batch_local` says that the loss depends
    on how the batch is cut, by nature; `homogeneous` that advantages times c > 0 give every token loss, and its gradient, times c, so that a
    sequence of advantages of 0 has no gradient and steps may leave it out. A loss that compares the two samples of a unit also has
    `unit_size = 2`, and names `sample:role` among its needs; then `tokens.pairs` are there.
    """

    needs: tuple[str, ...]
    reducers: tuple[str, ...] | None
    advised_reducers: tuple[str, ...] | None
    batch_local: bool
    homogeneous: bool

    def __call__(self, tokens: LossTokens) -> "LossOutput | torch.Tensor":
        """Per-token loss [n]; never multiplies by weights, divides by counts or touches the global random state."""


@define
class FunctionLoss:
    """A loss made of a plain function and its config; the product of the `loss` decorator."""

    name: str
    function: Callable[..., "LossOutput | torch.Tensor"]
    config: object
    needs: tuple[str, ...]
    reducers: tuple[str, ...] | None = None
    advised_reducers: tuple[str, ...] | None = None
    batch_local: bool = False
    homogeneous: bool = False
    unit_size: int = 1

    def __call__(self, tokens: LossTokens) -> "LossOutput | torch.Tensor":
        return self.function(tokens, self.config)


def compares_pairs(loss: object) -> bool:
    """Return True for a loss that is given the two samples of a unit together (`unit_size = 2`)."""
    return getattr(loss, "unit_size", 1) == 2


def as_loss_output(label: str, result: "LossOutput | torch.Tensor", count: int) -> LossOutput:
    """Take what a loss returned as a LossOutput with one value per token and metrics of its own; `label` names the loss in errors.

    Raises ResultError for another number of values, for what is no Metric, and for a metric under a name that is the engine's.
    """
    output = result if isinstance(result, LossOutput) else LossOutput(result)
    shape = getattr(output.token_loss, "shape", None)
    if shape is None or tuple(shape) != (count,):
        got = describe_returned(output.token_loss) if shape is None else f"shape {list(shape)}"
        raise ResultError(
            f"{label} returned {got} for {count} tokens",
            remedy="Return one value per token (a tensor of shape [n]) and leave summing and averaging to the reducer",
        )
    refuse_other_metrics(label, output.metrics)
    return output
