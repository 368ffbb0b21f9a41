"""Dense packed rows in whole-array NumPy steps; `loops.py` next to it is the definition, equal bit for bit."""

from collections.abc import Container
from itertools import pairwise

import numpy as np
from attrs import frozen

from skyrl_engine import DataError
from skyrl_engine.contracts import AnyArray, GatherIndex, IntArray, MicroBatchPlan, Ragged, SampleColumns, offsets_of
from skyrl_engine_collators.extras import Placement, extra_names
from skyrl_engine_collators.planning.alignment import round_up
from skyrl_engine_collators.segments import write_segments
from skyrl_engine_collators.wide import narrow_columns


@frozen(eq=False)
class PackedRows:
    """The places of n samples in R rows.

    int64[n]: the sample's `samples` number, its row in `sample_rows`, the column it begins in (`columns`), its length in `tokens`.
    Of its response: `scored` tokens have a predecessor, the first of them is `first_scored` on the flat action axis of the whole columns
    and is predicted in column `first_slot`. `actions` counts all of them. `row_offsets` int64[R+1] as in the plan, `row_ends` int64[R] the
    column after the last sample, alignment included.
    """

    samples: IntArray
    sample_rows: IntArray
    columns: IntArray
    tokens: IntArray
    actions: IntArray
    scored: IntArray
    first_scored: IntArray
    first_slot: IntArray
    row_offsets: IntArray
    row_ends: IntArray
    width: int

    @classmethod
    def of(cls, columns: SampleColumns, micro_batch: MicroBatchPlan) -> "PackedRows":
        """Place the samples of a micro-batch. Raises DataError if they are longer than the rows that were planned."""
        samples, row_offsets = micro_batch.samples, micro_batch.row_offsets
        tokens = columns.token_offsets[samples + 1] - columns.token_offsets[samples]
        actions = columns.action_offsets[samples + 1] - columns.action_offsets[samples]
        offsets = offsets_of(round_up(tokens, micro_batch.alignment))
        row_starts = offsets[row_offsets[:-1]]
        row_ends = offsets[row_offsets[1:]] - row_starts
        if (row_ends > micro_batch.width).any():
            row = int(np.argmax(row_ends > micro_batch.width))
            ids = columns.sample_ids[samples[row_offsets[row] : row_offsets[row + 1]]]
            raise DataError(
                f"samples {ids[:5].tolist()} occupy {int(row_ends[row])} tokens of a packed row, the plan's rows hold {micro_batch.width}",
                remedy="Plan with the lengths of the columns that are built",
            )
        sample_rows = np.repeat(np.arange(micro_batch.rows, dtype=np.int64), np.diff(row_offsets))
        begins = offsets[:-1] - row_starts[sample_rows]
        prompts = tokens - actions
        unscored = prompts == 0  # the response begins the sample, and nothing predicts its first token
        return cls(
            samples=samples,
            sample_rows=sample_rows,
            columns=begins,
            tokens=tokens,
            actions=actions,
            scored=actions - unscored,
            first_scored=columns.action_offsets[samples] + unscored,
            first_slot=begins + np.maximum(prompts - 1, 0),
            row_offsets=row_offsets,
            row_ends=row_ends,
            width=micro_batch.width,
        )

    @property
    def action_shape(self) -> tuple[int, int]:
        return len(self.row_ends), self.width - 1

    def action_pieces(self) -> dict[str, IntArray]:
        """The scored tokens as pieces: where each starts on the action axis, its length, and its place in rows of `action_shape`."""
        places = self.sample_rows * (self.width - 1) + self.first_slot
        return {"starts": self.first_scored, "lengths": self.scored, "places": places}

    @property
    def placement(self) -> Placement:
        """The places of the samples' tokens."""
        return Placement(self.samples, self.sample_rows * self.width + self.columns, (len(self.row_ends), self.width))

    @property
    def sequence_lengths(self) -> Ragged:
        """Per row int64[samples]."""
        return Ragged(self.tokens, self.row_offsets)

    @property
    def cu_seqlens(self) -> Ragged:
        """Per row int32[samples + 1]."""
        starts = self.row_offsets + np.arange(len(self.row_offsets), dtype=np.int64)  # every row has one entry more than samples
        flat = np.empty(int(starts[-1]), dtype=np.int32)
        flat[np.arange(len(self.columns), dtype=np.int64) + self.sample_rows] = self.columns
        flat[starts[1:] - 1] = self.row_ends
        return Ragged(flat, starts)


def field_names(columns: SampleColumns) -> frozenset[str]:
    """Return the names of all fields that these columns have."""
    return frozenset(("input_ids", "attention_mask", "position_ids", "loss_weight", *columns.columns, *extra_names(columns)))


def build_fields(columns: SampleColumns, rows: PackedRows, pad_token_id: int, wanted: Container[str]) -> dict[str, AnyArray]:
    """Return the fields that are `wanted` and exist, each written once; shapes and dtypes as in `reference.build_fields`."""
    token_shape = (len(rows.row_ends), rows.width)
    slot_shape = (len(rows.row_ends), rows.width - 1)
    fields: dict[str, AnyArray] = {}

    def make(name: str, shape: tuple[int, int], dtype: str) -> AnyArray:
        fields[name] = array = np.empty(shape, dtype=dtype)
        return array.reshape(-1)

    places = rows.sample_rows * rows.width + rows.columns
    if "input_ids" in wanted:
        flat = make("input_ids", token_shape, "int64")
        starts = columns.token_offsets[rows.samples]
        write_segments(flat, pad_token_id, columns.input_ids, starts=starts, lengths=rows.tokens, places=places)
    if "attention_mask" in wanted:
        _write_ones(make("attention_mask", token_shape, "int64"), rows.tokens, places)
    if "position_ids" in wanted:
        counted = np.arange(rows.tokens.max(initial=0), dtype=np.int64)
        flat = make("position_ids", token_shape, "int64")
        write_segments(flat, 0, counted, starts=np.zeros_like(places), lengths=rows.tokens, places=places)
    slots = rows.sample_rows * (rows.width - 1) + rows.first_slot
    present = narrow_columns(columns)
    for name, values in present.items():
        if name in wanted:
            flat = make(name, slot_shape, "float32")
            write_segments(flat, 0, values, starts=rows.first_scored, lengths=rows.scored, places=slots)
    return fields


def _write_ones(out: AnyArray, lengths: IntArray, places: IntArray) -> None:
    """Write 1 on the pieces and 0 elsewhere; adjacent pieces are written as one."""
    ends = places + lengths
    begins = np.flatnonzero(np.append(True, places[1:] != ends[:-1])[: len(places)])
    merged = places[begins]
    spans = ends[np.append(begins[1:], len(places))[: len(begins)] - 1] - merged
    ones = np.broadcast_to(np.int64(1), (int(spans.max(initial=0)),))
    write_segments(out, 0, ones, starts=np.zeros_like(merged), lengths=spans, places=merged)


def gather_index(rows: PackedRows) -> GatherIndex:
    """Return the position that predicts each action token; entries are in sample order, so actions ascend."""
    places = offsets_of(rows.scored)
    total = int(places[-1])
    actions, row_of, columns = (np.empty(total, dtype=np.int64) for _ in range(3))
    skipped = offsets_of(rows.actions)[:-1][rows.scored < rows.actions]
    jumps = skipped - np.arange(len(skipped), dtype=np.int64)  # the entry that comes after each action without one
    actions.fill(1)
    actions[:1] = 0
    np.add.at(actions, jumps[jumps < total], 1)
    np.cumsum(actions, out=actions)
    counted = np.arange(rows.width, dtype=np.int64)
    write_segments(columns, 0, counted, starts=rows.first_slot, lengths=rows.scored, places=places[:-1])
    for row, (start, stop) in enumerate(pairwise(places[rows.row_offsets].tolist())):
        row_of[start:stop] = row
    return GatherIndex(actions, row_of, columns)
