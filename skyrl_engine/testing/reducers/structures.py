"""Structures for reducers: the counts of mini-batches, with fractional weights, empty sequences, groups, micro-batches."""

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, offsets_of, segment_indices
from skyrl_engine.testing.reducers.reading import Reading

MAX_SEQUENCE_LENGTH = 8
LONG = 300
"""A long sequence repeats its loss weights so often."""
COUNTS = Reading()
_FRACTIONS = (1.0, 0.5, 0.25, 0.75, 2.0, 1 / 3)


def structure_of(
    weights: list[AnyArray],
    *,
    group_ids: IntArray | None = None,
    unit_ids: IntArray | None = None,
    micro_batch: IntArray | None = None,
    trajectory_ids: IntArray | None = None,
) -> BatchStructure:
    """Make a structure from one array of loss weights per sequence."""
    numbers = np.arange(len(weights), dtype=np.int64)
    return BatchStructure(
        loss_weight=np.concatenate(weights) if weights else np.zeros(0, np.uint8),
        action_offsets=offsets_of([len(sequence_weights) for sequence_weights in weights]),
        group_ids=numbers if group_ids is None else group_ids,
        unit_ids=numbers if unit_ids is None else unit_ids,
        micro_batch=np.zeros(len(weights), np.int64) if micro_batch is None else micro_batch,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        trajectory_ids=numbers if trajectory_ids is None else trajectory_ids,
    )


def sequences_of(structure: BatchStructure) -> list[AnyArray]:
    """Return the loss weights of each sequence."""
    return np.split(structure.loss_weight, structure.action_offsets[1:-1]) if len(structure) else []


@frozen(eq=False)
class DrawnStructure:
    """A structure that describes itself in words."""

    structure: BatchStructure

    def __str__(self) -> str:
        structure = self.structure
        lines = [
            f"sequence {i} has the loss weights {_format_values(weights)}" for i, weights in enumerate(sequences_of(structure))
        ]
        if len(np.unique(structure.group_ids)) < len(structure):
            lines.append(f"groups {_format_values(structure.group_ids)}")
        if len(np.unique(structure.trajectory_ids)) < len(structure):
            lines.append(f"trajectories {_format_values(structure.trajectory_ids)}")
        if len(np.unique(structure.micro_batch)) > 1:
            lines.append(f"micro-batches {_format_values(structure.micro_batch)}")
        lines += [
            f"{name} {_format_values(values.ravel())}" for name, values in {**structure.columns, **structure.sample_values}.items()
        ]
        return "\n".join(lines)


@frozen(eq=False)
class ReorderedStructure(DrawnStructure):
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
        return f"{super().__str__()}\nin the order {_format_values(self.order)}"


@frozen(eq=False)
class RecutStructure(DrawnStructure):
    """A structure, and other micro-batches."""

    micro_batch: IntArray

    @property
    def recut(self) -> BatchStructure:
        return evolve(self.structure, micro_batch=self.micro_batch)

    def __str__(self) -> str:
        return f"{super().__str__()}\nand in the micro-batches {_format_values(self.micro_batch)}"


@frozen(eq=False)
class RelabelledStructure(DrawnStructure):
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
        return f"{super().__str__()}\nand with the groups named {_format_values(self.relabelled.group_ids)}"


@frozen(eq=False)
class ExtendedStructure(DrawnStructure):
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


_MOST_NUMBERS = 24
"""Numbers that a counterexample spells out."""


def _format_values(values: npt.ArrayLike) -> str:
    numbers = [value if isinstance(value, str) else f"{value:g}" for value in np.asarray(values).tolist()]
    more = [f"... ({len(numbers)} in all)"] if len(numbers) > _MOST_NUMBERS else []
    return ", ".join(numbers[:_MOST_NUMBERS] + more) or "none"


@st.composite
def structures(
    draw: st.DrawFn, *, reading: Reading = COUNTS, min_sequences: int = 1, max_sequences: int = 4, empty: bool = True
) -> BatchStructure:
    """Draw mini-batches of masks (uint8) or fractional weights (float32), with what a reducer reads of them. `empty` allows sequences without
    loss or without any token.

    Some have sequences of more tokens than fit the byte that a mask's weights are.
    """
    fractions = draw(st.booleans())
    choices: tuple[float, ...] = _FRACTIONS if fractions else (1.0,)
    repeats = draw(st.sampled_from((1, 1, 1, LONG)))
    tokens = st.lists(st.sampled_from((*choices, 0.0)), min_size=0 if empty else 1, max_size=4)
    label = st.integers(0, max_sequences - 1)
    # One draw per sequence, so that Hypothesis drops a sequence that does not matter with all that belongs to it.
    rows = draw(st.lists(st.tuples(tokens, label, label, st.integers(0, 1)), min_size=min_sequences, max_size=max_sequences))
    weights = []
    for row, *_ in rows:
        row_weights = row if empty or any(row) else [1.0, *row[1:]]
        weights.append(np.tile(np.asarray(row_weights, dtype=np.float32 if fractions else np.uint8), repeats))
    _, groups, trajectories, steps = zip(*rows, strict=True)
    structure = structure_of(
        weights,
        group_ids=np.asarray(groups, dtype=np.int64) % len(rows),
        micro_batch=np.cumsum([0, *steps[1:]]).astype(np.int64),
        trajectory_ids=np.asarray(trajectories, dtype=np.int64) % len(rows),
    )
    return reading.fill(structure, draw(st.integers(0, 255))) if reading.needs else structure


def _micro_batches(draw: st.DrawFn, count: int) -> IntArray:
    """Draw ascending numbers, as a plan's micro-batches follow each other."""
    steps = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return np.cumsum([0, *steps[1:]]).astype(np.int64)


@st.composite
def draw_reordered(draw: st.DrawFn, reading: Reading = COUNTS) -> ReorderedStructure:
    structure = draw(structures(reading=reading, min_sequences=2))
    order = draw(st.permutations(range(len(structure))).filter(lambda order: list(order) != sorted(order)))
    return ReorderedStructure(structure, np.asarray(order, dtype=np.int64))


@st.composite
def draw_recut(draw: st.DrawFn, reading: Reading = COUNTS) -> RecutStructure:
    structure = draw(structures(reading=reading, min_sequences=2))
    return RecutStructure(structure, _micro_batches(draw, len(structure)))


@st.composite
def draw_relabelled(draw: st.DrawFn, reading: Reading = COUNTS) -> RelabelledStructure:
    structure = draw(structures(reading=reading))
    names = draw(st.lists(st.integers(0, 40), min_size=len(structure), max_size=len(structure), unique=True))
    return RelabelledStructure(structure, np.asarray(names, dtype=np.int64))


@st.composite
def draw_with_empty(draw: st.DrawFn, reading: Reading = COUNTS) -> ExtendedStructure:
    structure = draw(structures(reading=reading, empty=False))
    return ExtendedStructure(structure, tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))))


CLOSE_IDS = 2**53
"""Ids from here on are closer than any float can tell apart, and too large to be places in any array."""


def make_threes(*, empty: bool = True) -> BatchStructure:
    """Return nine sequences in units of three, groups of six and three, and three micro-batches; `empty`: some have no loss or no token."""
    numbers = np.arange(9, dtype=np.int64)
    rows: list[list[float]] = [[1, 0.5], [1], [0.25, 1, 1], [1, 2], [], [1], [0, 0], [1, 1], [0.75]]
    row_weights = [row if empty or any(row) else [1.0] for row in rows]
    return structure_of(
        [np.asarray(row, dtype=np.float32) for row in row_weights],
        group_ids=numbers // 6,
        unit_ids=numbers // 3,
        micro_batch=numbers // 3,
        trajectory_ids=numbers // 2,
    )


def make_long_masks() -> BatchStructure:
    """Return masks of 300 and 3 tokens, more than the byte that a mask is made of counts to."""
    return structure_of([np.ones(300, np.uint8), np.ones(3, np.uint8)], group_ids=np.zeros(2, np.int64))


MANY = 136


def make_many() -> BatchStructure:
    """Return masks of `MANY` sequences of 31 or 32 tokens, in two groups, each larger than 64, and micro-batches of four."""
    numbers = np.arange(MANY, dtype=np.int64)
    masks = [np.ones(31 + number % 2, np.uint8) for number in range(MANY)]
    return structure_of(
        masks, group_ids=numbers // (MANY // 2), unit_ids=numbers // 4, micro_batch=numbers // 4, trajectory_ids=numbers // 2
    )


def make_without_groups() -> BatchStructure:
    """Return a structure of data that has no group ids."""
    return evolve(make_threes(empty=False), group_ids=np.arange(9, dtype=np.int64), grouped=False)


def make_without_length() -> BatchStructure:
    """Return a structure of a run that sets no longest sequence."""
    return evolve(make_threes(empty=False), max_sequence_length=None)


def list_explicit(*, empty: bool = True) -> list[DrawnStructure]:
    """Return structures that no draw holds."""
    return [DrawnStructure(make_threes(empty=empty)), DrawnStructure(make_long_masks()), DrawnStructure(make_many())]


def list_recut() -> list[RecutStructure]:
    """Return structures in other micro-batches."""
    fewer = RecutStructure(make_many(), np.arange(MANY, dtype=np.int64) // 16)
    return [
        RecutStructure(make_threes(), np.zeros(9, np.int64)),
        RecutStructure(make_long_masks(), np.array([0, 1], np.int64)),
        fewer,
    ]


def list_reordered() -> list[ReorderedStructure]:
    """Return structures in another order."""
    return [
        ReorderedStructure(make_threes(), np.array([6, 7, 8, 0, 1, 2, 3, 4, 5], np.int64)),
        ReorderedStructure(make_long_masks(), np.array([1, 0], np.int64)),
    ]


def list_closely_relabelled() -> list[RelabelledStructure]:
    """Return a structure with names that no float or no 32 bits can tell apart, and that do not rise."""
    order = np.array([1, 0, 2, 5, 4, 3, 8, 7, 6], dtype=np.int64)
    return [RelabelledStructure(make_threes(), names) for names in (CLOSE_IDS + order, 5 + 2**32 * order)]


def list_with_empty() -> list[ExtendedStructure]:
    """Return structures of many sequences, and sequences without loss next to them."""
    return [ExtendedStructure(make_threes(empty=False), (0, 2)), ExtendedStructure(make_long_masks(), (1,))]
