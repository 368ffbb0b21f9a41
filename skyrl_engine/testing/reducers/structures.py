"""Structures for reducers: the counts of mini-batches, with fractional weights, empty sequences, groups, micro-batches."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.needs import ColumnForm, column_forms, sample_value
from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, offsets_of, segment_indices

MAX_SEQUENCE_LENGTH = 8
LONG = 300
"""A long sequence repeats its loss weights so often."""
_FRACTIONS = (1.0, 0.5, 0.25, 0.75, 2.0, 1 / 3)


def structure_of(
    weights: list[AnyArray],
    *,
    group_ids: IntArray | None = None,
    micro_batch: IntArray | None = None,
    trajectory_ids: IntArray | None = None,
) -> BatchStructure:
    """Make a structure from one array of loss weights per sequence."""
    numbers = np.arange(len(weights), dtype=np.int64)
    return BatchStructure(
        loss_weight=np.concatenate(weights) if weights else np.zeros(0, np.uint8),
        action_offsets=offsets_of([len(each) for each in weights]),
        group_ids=numbers if group_ids is None else group_ids,
        unit_ids=numbers,
        micro_batch=np.zeros(len(weights), np.int64) if micro_batch is None else micro_batch,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        trajectory_ids=numbers if trajectory_ids is None else trajectory_ids,
    )


def sequences_of(structure: BatchStructure) -> list[AnyArray]:
    """Return the loss weights of each sequence."""
    return np.split(structure.loss_weight, structure.action_offsets[1:-1]) if len(structure) else []


@frozen(eq=False)
class Drawn:
    """A structure that describes itself in words."""

    structure: BatchStructure

    def __str__(self) -> str:
        structure = self.structure
        lines = [f"sequence {i} has the loss weights {_listed(each)}" for i, each in enumerate(sequences_of(structure))]
        if len(np.unique(structure.group_ids)) < len(structure):
            lines.append(f"groups {_listed(structure.group_ids)}")
        if len(np.unique(structure.trajectory_ids)) < len(structure):
            lines.append(f"trajectories {_listed(structure.trajectory_ids)}")
        if len(np.unique(structure.micro_batch)) > 1:
            lines.append(f"micro-batches {_listed(structure.micro_batch)}")
        lines += [f"{name} {_listed(values.ravel())}" for name, values in {**structure.columns, **structure.sample_values}.items()]
        return "\n".join(lines)


@frozen(eq=False)
class Reordered(Drawn):
    """A structure, and another order of its sequences."""

    order: IntArray

    @property
    def moved(self) -> BatchStructure:
        structure, order = self.structure, self.order
        return evolve(
            structure,
            loss_weight=structure.loss_weight[self.tokens],
            action_offsets=offsets_of(np.diff(structure.action_offsets)[order]),
            group_ids=structure.group_ids[order],
            unit_ids=structure.unit_ids[order],
            micro_batch=structure.micro_batch[order],
            sample_ids=structure.sample_ids[order],
            trajectory_ids=structure.trajectory_ids[order],
            columns={name: values[self.tokens] for name, values in structure.columns.items()},
            sample_values={name: values[order] for name, values in structure.sample_values.items()},
        )

    @property
    def tokens(self) -> IntArray:
        """Return the earlier positions of the moved tokens."""
        return segment_indices(self.structure.action_offsets, self.order)

    def __str__(self) -> str:
        return f"{super().__str__()}\nin the order {_listed(self.order)}"


@frozen(eq=False)
class Recut(Drawn):
    """A structure, and other micro-batches."""

    micro_batch: IntArray

    @property
    def recut(self) -> BatchStructure:
        return evolve(self.structure, micro_batch=self.micro_batch)

    def __str__(self) -> str:
        return f"{super().__str__()}\nand in the micro-batches {_listed(self.micro_batch)}"


@frozen(eq=False)
class Relabelled(Drawn):
    """A structure, and other names of its groups, units and samples."""

    names: IntArray

    @property
    def relabelled(self) -> BatchStructure:
        structure = self.structure
        return evolve(
            structure,
            group_ids=self.names[structure.group_ids],
            unit_ids=self.names[structure.unit_ids],
            sample_ids=self.names[structure.sample_ids],
            trajectory_ids=self.names[structure.trajectory_ids],
        )

    def __str__(self) -> str:
        return f"{super().__str__()}\nand with the groups named {_listed(self.relabelled.group_ids)}"


@frozen(eq=False)
class WithEmpty(Drawn):
    """A structure in which every sequence carries loss, and a number of sequences without loss to append, each in a group of its own.

    `actions` is the number of response tokens of each of them, all of weight 0.
    """

    actions: tuple[int, ...]

    @property
    def extended(self) -> BatchStructure:
        structure, more = self.structure, len(self.actions)
        weight = structure.loss_weight
        names = np.arange(len(structure), len(structure) + more) + 100
        return BatchStructure(
            loss_weight=np.concatenate([weight, np.zeros(sum(self.actions), weight.dtype)]),
            action_offsets=offsets_of([*np.diff(structure.action_offsets), *self.actions]),
            group_ids=np.concatenate([structure.group_ids, names]),
            unit_ids=np.concatenate([structure.unit_ids, names]),
            micro_batch=np.concatenate([structure.micro_batch, np.full(more, structure.micro_batch[-1])]),
            max_sequence_length=structure.max_sequence_length,
            trajectory_ids=np.concatenate([structure.trajectory_ids, names]),
            columns={
                name: np.concatenate([values, np.zeros((sum(self.actions), *values.shape[1:]), values.dtype)])
                for name, values in structure.columns.items()
            },
            sample_values={
                name: np.concatenate([values, np.repeat(values[-1:], more)]) for name, values in structure.sample_values.items()
            },
        )

    def __str__(self) -> str:
        return f"{super().__str__()}\nand {len(self.actions)} sequence{'s' * (len(self.actions) > 1)} without loss"


_TOLD = 24
"""Numbers that a counterexample spells out."""


def _listed(values: npt.ArrayLike) -> str:
    numbers = [f"{value:g}" for value in np.asarray(values).tolist()]
    more = [f"... ({len(numbers)} in all)"] if len(numbers) > _TOLD else []
    return ", ".join(numbers[:_TOLD] + more) or "none"


def with_needs(structure: BatchStructure, needs: Iterable[str], seed: int = 0) -> BatchStructure:
    """Return the structure with the columns and values of samples that a reducer needs: few different ones, so that some are shared."""
    numbers, asked, count = np.random.default_rng(seed), tuple(needs), len(structure.loss_weight)
    forms = column_forms(asked)
    return evolve(
        structure,
        columns={name: _column(numbers, form, count) for name, form in forms.items()},
        sample_values={name: numbers.integers(0, 3, len(structure)) for name in filter(None, map(sample_value, asked))},
    )


def _column(numbers: np.random.Generator, form: ColumnForm, count: int) -> AnyArray:
    shape = count if form == "number" else (count, 2)
    if form == "token ids":
        return numbers.integers(0, 50, shape)
    return (numbers.integers(-8, 9, shape) / 4).astype(np.float32)


@st.composite
def structures(
    draw: st.DrawFn, *, needs: Iterable[str] = (), min_sequences: int = 1, max_sequences: int = 4, empty: bool = True
) -> BatchStructure:
    """Draw mini-batches of masks (uint8) or fractional weights (float32), with what a reducer `needs` of them. `empty` allows sequences without
    loss or without any token.

    Some have sequences of more tokens than fit the byte that a mask's weights are.
    """
    count = draw(st.integers(min_sequences, max_sequences))
    fractions = draw(st.booleans())
    choices: tuple[float, ...] = _FRACTIONS if fractions else (1.0,)
    repeated = draw(st.sampled_from((1, 1, 1, LONG)))
    weights = []
    for _ in range(count):
        row = draw(st.lists(st.sampled_from((*choices, 0.0)), min_size=0 if empty else 1, max_size=4))
        if not empty and not any(row):
            row[0] = 1.0
        weights.append(np.tile(np.asarray(row, dtype=np.float32 if fractions else np.uint8), repeated))
    labels = st.lists(st.integers(0, count - 1), min_size=count, max_size=count)
    groups, trajectories = (np.asarray(draw(labels), dtype=np.int64) for _ in range(2))
    made = structure_of(weights, group_ids=groups, micro_batch=_micro_batches(draw, count), trajectory_ids=trajectories)
    asked = tuple(needs)
    return with_needs(made, asked, draw(st.integers(0, 255))) if asked else made


def _micro_batches(draw: st.DrawFn, count: int) -> IntArray:
    """Draw ascending numbers, as a plan's micro-batches follow each other."""
    steps = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return np.cumsum([0, *steps[1:]]).astype(np.int64)


@st.composite
def reordered(draw: st.DrawFn, needs: Iterable[str] = ()) -> Reordered:
    structure = draw(structures(needs=needs, min_sequences=2))
    order = draw(st.permutations(range(len(structure))).filter(lambda order: list(order) != sorted(order)))
    return Reordered(structure, np.asarray(order, dtype=np.int64))


@st.composite
def recut(draw: st.DrawFn, needs: Iterable[str] = ()) -> Recut:
    structure = draw(structures(needs=needs, min_sequences=2))
    return Recut(structure, _micro_batches(draw, len(structure)))


@st.composite
def relabelled(draw: st.DrawFn, needs: Iterable[str] = ()) -> Relabelled:
    structure = draw(structures(needs=needs))
    names = draw(st.lists(st.integers(0, 40), min_size=len(structure), max_size=len(structure), unique=True))
    return Relabelled(structure, np.asarray(names, dtype=np.int64))


@st.composite
def with_empty(draw: st.DrawFn, needs: Iterable[str] = ()) -> WithEmpty:
    structure = draw(structures(needs=needs, empty=False))
    return WithEmpty(structure, tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))))
