"""Dense rows of trees in whole-array NumPy steps; `loops.py` next to it is the definition, equal bit for bit."""

from collections.abc import Container, Iterator
from itertools import pairwise

import numpy as np
from attrs import frozen

from skyrl_engine import DataError
from skyrl_engine.contracts import AnyArray, GatherIndex, IntArray, MicroBatchPlan, PrefixTree, Ragged, SampleColumns, offsets_of
from skyrl_engine_collators.segments import write_segments
from skyrl_engine_collators.wide import narrow_columns


@frozen(eq=False)
class TreeRows:
    """The places of n samples in R rows. int64[n], by sample in the plan's order:

    `samples` are their numbers in the columns, `tokens` and `actions` their lengths; the first `shared` tokens lie where the samples before
    have them, and the others from column `columns` of row `sample_rows` on. `row_offsets` int64[R+1] as in the plan.
    """

    samples: IntArray
    sample_rows: IntArray
    columns: IntArray
    tokens: IntArray
    actions: IntArray
    shared: IntArray
    row_offsets: IntArray
    width: int
    action_width: int

    @classmethod
    def of(cls, columns: SampleColumns, micro_batch: MicroBatchPlan) -> "TreeRows":
        """Place the samples of a micro-batch. Raises DataError if they do not fit its rows, or do not share what the plan says."""
        samples, row_offsets = micro_batch.samples, micro_batch.row_offsets
        tokens = columns.token_offsets[samples + 1] - columns.token_offsets[samples]
        actions = columns.action_offsets[samples + 1] - columns.action_offsets[samples]
        shared = np.zeros_like(samples) if micro_batch.shared is None else micro_batch.shared
        _check_shared(columns, samples, tokens, shared)
        offsets = offsets_of(tokens - shared)
        row_starts = offsets[row_offsets[:-1]]
        occupied = offsets[row_offsets[1:]] - row_starts
        if (occupied > micro_batch.width).any():
            row = int(np.argmax(occupied > micro_batch.width))
            ids = columns.sample_ids[samples[row_offsets[row] : row_offsets[row + 1]]]
            raise DataError(
                f"samples {ids[:5].tolist()} occupy {int(occupied[row])} tokens of a row, the plan's rows hold {micro_batch.width}",
                remedy="Plan with the lengths of the columns that are built",
            )
        sample_rows = np.repeat(np.arange(micro_batch.rows, dtype=np.int64), np.diff(row_offsets))
        return cls(
            samples=samples,
            sample_rows=sample_rows,
            columns=offsets[:-1] - row_starts[sample_rows],
            tokens=tokens,
            actions=actions,
            shared=shared,
            row_offsets=row_offsets,
            width=micro_batch.width,
            action_width=micro_batch.action_width,
        )

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def pieces(self) -> dict[str, IntArray]:
        """The tokens that are not shared, as pieces: their lengths, and their places in rows of `width` end to end."""
        return {"lengths": self.tokens - self.shared, "places": self.sample_rows * self.width + self.columns}

    def action_pieces(self, columns: SampleColumns) -> dict[str, IntArray]:
        """The responses as pieces, those of a row one after the other from its first slot: start on the action axis, length and place."""
        offsets = offsets_of(self.actions)
        places = self.sample_rows * self.action_width + offsets[:-1] - offsets[self.row_offsets[self.sample_rows]]
        return {"starts": columns.action_offsets[self.samples], "lengths": self.actions, "places": places}

    def iterate_rows(self) -> Iterator[range]:
        """Yield the samples of each row, by their place among the n."""
        return (range(start, stop) for start, stop in pairwise(self.row_offsets.tolist()))


def _check_shared(columns: SampleColumns, samples: IntArray, tokens: IntArray, shared: IntArray) -> None:
    ids, starts = columns.input_ids, columns.token_offsets[samples]
    for place in np.flatnonzero(shared).tolist():
        count, start, before = int(shared[place]), int(starts[place]), int(starts[place - 1])
        enough = count <= min(int(tokens[place]), int(tokens[place - 1]))
        if not (enough and np.array_equal(ids[start : start + count], ids[before : before + count])):
            one, other = columns.sample_ids[samples[[place, place - 1]]].tolist()
            raise DataError(
                f"sample {one} does not begin with the first {count} tokens of sample {other}, as the plan says",
                remedy="Plan with the tokens of the columns that are built",
            )


def field_names(columns: SampleColumns) -> frozenset[str]:
    """Return the names of all fields that these columns have."""
    return frozenset(("input_ids", "attention_mask", "position_ids", "loss_weight", *columns.columns))


def build_fields(columns: SampleColumns, rows: TreeRows, pad_token_id: int, wanted: Container[str]) -> dict[str, AnyArray]:
    """Return the fields that are `wanted` and exist but for wide columns, each written once; shapes and dtypes as in `loops.build_fields`."""
    fields: dict[str, AnyArray] = {}

    def make(name: str, width: int, dtype: str) -> AnyArray:
        fields[name] = array = np.empty((len(rows), width), dtype=dtype)
        return array.reshape(-1)

    pieces = rows.pieces()
    counted = np.arange(rows.tokens.max(initial=0), dtype=np.int64)
    if "input_ids" in wanted:
        starts = columns.token_offsets[rows.samples] + rows.shared
        write_segments(make("input_ids", rows.width, "int64"), pad_token_id, columns.input_ids, starts=starts, **pieces)
    if "attention_mask" in wanted:
        ones = np.broadcast_to(np.int64(1), counted.shape)
        write_segments(make("attention_mask", rows.width, "int64"), 0, ones, starts=np.zeros_like(rows.samples), **pieces)
    if "position_ids" in wanted:
        write_segments(make("position_ids", rows.width, "int64"), 0, counted, starts=rows.shared, **pieces)
    for name, values in narrow_columns(columns).items():
        if name in wanted:
            write_segments(make(name, rows.action_width, "float32"), 0, values, **rows.action_pieces(columns))
    return fields


def gather_index(rows: TreeRows) -> GatherIndex:
    """Return the position that predicts each action token: of the first token behind a shared prefix, the end of that prefix."""
    scored = rows.actions - (rows.actions == rows.tokens)  # nothing predicts the first token of a sample
    places = offsets_of(scored)
    columns = np.empty(int(places[-1]), dtype=np.int64)
    path = np.empty(int(rows.tokens.max(initial=0)), dtype=np.int64)  # the column of each token of the sample at hand
    counted = np.arange(rows.width, dtype=np.int64)
    numbers = zip(*(array.tolist() for array in (rows.columns, rows.tokens, rows.shared, scored, places[:-1])), strict=True)
    for column, tokens, shared, count, place in numbers:
        path[shared:tokens] = counted[column : column + tokens - shared]
        columns[place : place + count] = path[tokens - 1 - count : tokens - 1]
    actions = np.ones(int(rows.actions.sum()), dtype=np.bool_)
    actions[offsets_of(rows.actions)[:-1][scored < rows.actions]] = False
    return GatherIndex(np.flatnonzero(actions), np.repeat(rows.sample_rows, scored), columns)


def prefix_tree(rows: TreeRows) -> PrefixTree:
    """Return the segments of every row."""
    cut = [_cut_row(rows, samples) for samples in rows.iterate_rows()]
    return PrefixTree(*(Ragged.from_list(values, np.int64) for values in zip(*cut, strict=True))) if cut else _NO_ROWS


_NO_ROWS = PrefixTree(*(Ragged.from_list([], np.int64) for _ in range(3)))


def _cut_row(rows: TreeRows, samples: range) -> tuple[list[int], list[int], list[int]]:
    """Return the segments of one row: lengths, parents, and the last one of each sample.

    A sample's own tokens end a segment where a later sample leaves its path. The path at hand is a stack of the samples whose tokens it is
    made of, each with the depth at which it is left.
    """
    tokens, shared = rows.tokens[samples.start : samples.stop].tolist(), rows.shared[samples.start : samples.stop].tolist()
    ends: list[set[int]] = [set() for _ in samples]  # depths at which segments of a sample's own tokens end
    path: list[int] = []
    for sample, (length, depth) in enumerate(zip(tokens, shared, strict=True)):
        while path and shared[path[-1]] >= depth:
            path.pop()
        if depth:
            ends[path[-1]].add(depth)
        if length > depth:
            ends[sample].add(length)
            path.append(sample)
    lengths: list[int] = []
    parents: list[int] = []
    last_segments: list[int] = []
    above: list[tuple[int, int]] = [(0, -1)]  # the path at hand: the depth at which each segment ends, and its number
    for sample, depth in enumerate(shared):
        while above[-1][0] > depth:
            above.pop()
        begin = depth
        for end in sorted(ends[sample]):
            lengths.append(end - begin)
            parents.append(above[-1][1])
            above.append((end, len(lengths) - 1))
            begin = end
        last_segments.append(above[-1][1])
    return lengths, parents, last_segments
