"""The plan of a batch: mini-batch -> data-parallel rank -> micro-batch -> row -> samples. Made from lengths alone, on the controller."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal

import numpy as np
from attrs import Factory, define, evolve, field, frozen
from attrs.validators import ge, optional

from skyrl_engine.contracts.values.prefixes import CommonPrefixes
from skyrl_engine.contracts.values.ragged import IntArray, offsets_of
from skyrl_engine.contracts.values.returned import describe_returned, require_all, require_returned, require_vector
from skyrl_engine.errors import ResultError

RowKind = Literal["padded", "packed", "tree"]
"""The forms of rows: one sample at most, samples one after the other, or samples whose common prefixes are there once."""


@frozen(eq=False)
class SampleLengths:
    """All that planning may look at. Every field is int64[N]; `tokens` counts prompt and response, `actions` the response alone.

    `trajectory_ids` name the attempt that a sample is a stretch of; each is its own where nobody says. `prefixes` say which samples begin
    with the same tokens; they are looked for where the collator plans rows of trees, and None elsewhere.
    """

    tokens: IntArray
    actions: IntArray
    sample_ids: IntArray
    group_ids: IntArray
    unit_ids: IntArray
    trajectory_ids: IntArray = Factory(lambda lengths: np.arange(len(lengths), dtype=np.int64), takes_self=True)
    prefixes: CommonPrefixes | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, samples: IntArray) -> "SampleLengths":
        """The lengths and ids of some samples, int64[n] positions, in this order."""
        return SampleLengths(
            self.tokens[samples],
            self.actions[samples],
            self.sample_ids[samples],
            self.group_ids[samples],
            self.unit_ids[samples],
            self.trajectory_ids[samples],
            None if self.prefixes is None else self.prefixes.take(samples),
        )


@frozen
class Layout:
    """The cut of a training batch: ranks, and the sizes of mini-batches and micro-batches.

    Sizes are samples (`mini_batch_size`), rows (`micro_batch_rows`) or tokens (`micro_batch_tokens`: rows x width, padding included);
    None means "all of it".
    """

    dp: int = field(default=1, validator=ge(1))
    tp: int = field(default=1, validator=ge(1))
    cp: int = field(default=1, validator=ge(1))
    pp: int = field(default=1, validator=ge(1))
    mini_batch_size: int | None = field(default=None, validator=optional(ge(1)))
    micro_batch_rows: int | None = field(default=None, validator=optional(ge(1)))
    micro_batch_tokens: int | None = field(default=None, validator=optional(ge(1)))


@define(eq=False, repr=False)
class BuildOrder:
    """The micro-batches of one rank in the order in which it will build them; a collator may prepare some ahead."""

    micro_batches: "tuple[MicroBatchPlan, ...]" = ()

    @classmethod
    def of(cls, micro_batches: Iterable["MicroBatchPlan"]) -> "tuple[MicroBatchPlan, ...]":
        """The same micro-batches, each of which knows this order and its place in it."""
        order = cls()
        order.micro_batches = tuple(
            evolve(micro_batch, order=order, place=place) for place, micro_batch in enumerate(micro_batches)
        )
        return order.micro_batches


@frozen(eq=False)
class MicroBatchPlan:
    """Rows of one micro-batch. Row r holds `samples[row_offsets[r]:row_offsets[r + 1]]`; a row may be empty (no sample, weight 0).

    `samples` int64[n] are positions in the batch that was planned (or in a rank's own columns after dispatch), `row_offsets` int64[R+1];
    `width` and `action_width` are the dense shapes' token and action axes. In rows of several samples, each occupies its tokens rounded up
    to a multiple of `alignment`; it travels with the rows because the rank that builds them has no layout. `order` says what will be built
    after it, where somebody knows: `order.micro_batches[place]` is then this plan itself, and a changed copy (`attrs.evolve`) is not.

    `shared` int64[n], where rows hold trees of common prefixes: the first `shared[k]` tokens of sample k are those of the sample before it in
    its row, and are computed once; 0 for the first sample of a row. A row then occupies the other tokens, and is rounded up as a whole.
    """

    samples: IntArray
    row_offsets: IntArray
    width: int
    action_width: int
    alignment: int = 1
    order: BuildOrder | None = field(default=None, repr=False)
    place: int = field(default=0, repr=False)
    shared: IntArray | None = None

    @property
    def following(self) -> "tuple[MicroBatchPlan, ...]":
        """The micro-batches that will be built after this one; none where nobody knows."""
        planned = () if self.order is None else self.order.micro_batches
        return planned[self.place + 1 :] if self.place < len(planned) and planned[self.place] is self else ()

    @property
    def rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def dense_tokens(self) -> int:
        """Tokens of the dense batch, padding included."""
        return self.rows * self.width

    def renumber(self, samples: IntArray) -> "MicroBatchPlan":
        """The same rows over other sample numbers, int64[n]."""
        assert len(samples) == len(self.samples)
        return evolve(self, samples=samples, order=None)


@frozen(eq=False)
class MiniBatchPlan:
    """One optimizer step: `ranks[dp]` is that rank's micro-batches; every rank has equally many."""

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]

    def rank_samples(self, dp: int) -> IntArray:
        """int64[n]: the samples of one data-parallel rank, in micro-batch order."""
        return _samples_of(self.ranks[dp])

    @property
    def samples(self) -> IntArray:
        """int64[n]: the mini-batch's samples in rank-major, micro-batch order."""
        return _samples_of(chain.from_iterable(self.ranks))


def _join_shared(parts: list[MicroBatchPlan]) -> IntArray | None:
    if all(part.shared is None for part in parts):
        return None
    return np.concatenate([np.zeros_like(part.samples) if part.shared is None else part.shared for part in parts])


def _samples_of(micro_batches: Iterable[MicroBatchPlan]) -> IntArray:
    parts = [micro_batch.samples for micro_batch in micro_batches]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@frozen(eq=False)
class BatchPlan:
    """The whole training batch, cut once and reused by every pass over it. `sample_ids` int64[N] are in the caller's order."""

    mini_batches: tuple[MiniBatchPlan, ...]
    layout: Layout
    sample_ids: IntArray

    def __iter__(self) -> Iterator["BatchPlan"]:
        """One plan per mini-batch, each over the same sample numbers."""
        for mini_batch in self.mini_batches:
            yield BatchPlan((mini_batch,), self.layout, self.sample_ids)

    @property
    def micro_batches(self) -> Iterator[MicroBatchPlan]:
        """Every micro-batch, mini-batch by mini-batch and rank by rank."""
        return (micro_batch for mini_batch in self.mini_batches for rank in mini_batch.ranks for micro_batch in rank)

    @property
    def joined(self) -> MicroBatchPlan:
        """Every row of the plan as one micro-batch, in the order of `micro_batches` and as wide as the widest of them."""
        parts = list(self.micro_batches)
        rows = [np.diff(part.row_offsets) for part in parts]
        return MicroBatchPlan(
            samples=_samples_of(parts),
            row_offsets=offsets_of(np.concatenate(rows) if rows else []),
            width=max((part.width for part in parts), default=1),
            action_width=max((part.action_width for part in parts), default=0),
            alignment=max((part.alignment for part in parts), default=1),
            shared=_join_shared(parts),
        )

    @property
    def dense_tokens(self) -> int:
        """Tokens of all dense batches, padding included."""
        return sum(micro_batch.dense_tokens for micro_batch in self.micro_batches)

    @property
    def shared_tokens(self) -> int | None:
        """Tokens of samples that are those of another sample in their row, and are not in the dense batches again; None: no row is a tree."""
        shared = [micro_batch.shared for micro_batch in self.micro_batches if micro_batch.shared is not None]
        return sum(int(tokens.sum()) for tokens in shared) if shared else None

    @property
    def expected_ids(self) -> IntArray:
        """int64[n]: ids of the planned samples in the caller's order."""
        planned = _samples_of(self.micro_batches)
        return np.repeat(self.sample_ids, np.bincount(planned, minlength=len(self.sample_ids)))


def one_sample_per_row(samples: IntArray, width: int, action_width: int) -> MicroBatchPlan:
    """A micro-batch in which every row holds one sample, int64[n]."""
    return MicroBatchPlan(samples, offsets_of(np.ones(len(samples), dtype=np.int64)), width, action_width)


def as_batch_plan(label: str, result: object) -> BatchPlan:
    """Take what `plan` of a collator returned, down to its rows. Raises ResultError, naming the collator, for other types and dtypes."""
    plan = require_returned(label, "plan", result, BatchPlan)
    require_returned(label, "layout of plan", plan.layout, Layout)
    require_vector(label, "plan", "sample_ids", plan.sample_ids, np.int64)
    require_all(label, "plan", "mini_batches", plan.mini_batches, MiniBatchPlan)
    for mini_batch in plan.mini_batches:
        require_all(label, "plan", "ranks", mini_batch.ranks, object)
        for rank in mini_batch.ranks:
            require_all(label, "plan", "a rank's micro-batches", rank, MicroBatchPlan)
            for micro_batch in rank:
                _require_rows(label, micro_batch)
    return plan


def _require_rows(label: str, micro_batch: MicroBatchPlan) -> None:
    require_vector(label, "plan", "samples", micro_batch.samples, np.int64)
    require_vector(label, "plan", "row_offsets", micro_batch.row_offsets, np.int64)
    offsets = micro_batch.row_offsets
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(micro_batch.samples) or (np.diff(offsets) < 0).any():
        raise ResultError(
            f"{label} returned row_offsets {offsets.tolist()!s:.80} for {len(micro_batch.samples)} samples from plan",
            remedy="Return offsets that rise from 0 to the number of samples",
        )
    if micro_batch.shared is not None:
        _require_shared(label, micro_batch, micro_batch.shared)
    for name in ("width", "action_width", "alignment"):
        size = getattr(micro_batch, name)
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 0:
            got = repr(size) if isinstance(size, int | float) else describe_returned(size)
            raise ResultError(f"{label} returned {got} as {name} from plan", remedy=f"Return a whole number as {name}")


def _require_shared(label: str, micro_batch: MicroBatchPlan, shared: IntArray) -> None:
    require_vector(label, "plan", "shared", shared, np.int64, len(micro_batch.samples))
    starts, ends = micro_batch.row_offsets[:-1], micro_batch.row_offsets[1:]
    if (shared < 0).any() or shared[starts[starts < ends]].any():
        raise ResultError(
            f"{label} returned shared {shared.tolist()!s:.80} for rows that begin with the samples {starts.tolist()!s:.80} from plan",
            remedy="Return 0 for the first sample of every row, and a number of tokens for each other",
        )
