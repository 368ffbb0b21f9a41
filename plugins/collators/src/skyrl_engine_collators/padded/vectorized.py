"""Dense padded rows in whole-array NumPy steps; `loops.py` next to it is the definition, equal bit for bit."""

from collections.abc import Container

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine import DataError
from skyrl_engine.contracts import (
    AnyArray,
    GatherIndex,
    IntArray,
    MicroBatchPlan,
    SampleColumns,
    offsets_of,
    segment_indices,
)
from skyrl_engine_collators.extras import Placement, extra_names
from skyrl_engine_collators.wide import narrow_columns

BoolMatrix = npt.NDArray[np.bool_]


@frozen(eq=False)
class PaddedRows:
    """Lengths of R rows: `tokens` and `actions` int64[R] (0 in a row without sample), `samples` int64[n] and their `sample_rows`."""

    samples: IntArray
    sample_rows: IntArray
    tokens: IntArray
    actions: IntArray
    width: int
    action_width: int

    @classmethod
    def of(cls, columns: SampleColumns, micro_batch: MicroBatchPlan) -> "PaddedRows":
        per_row = np.diff(micro_batch.row_offsets)
        assert (per_row <= 1).all(), "a padded row holds one sample; this plan was made for another layout"
        sample_rows = np.repeat(np.arange(micro_batch.rows, dtype=np.int64), per_row)
        tokens = np.zeros(micro_batch.rows, dtype=np.int64)
        actions = np.zeros(micro_batch.rows, dtype=np.int64)
        tokens[sample_rows] = np.diff(columns.token_offsets)[micro_batch.samples]
        actions[sample_rows] = np.diff(columns.action_offsets)[micro_batch.samples]
        too_long = (tokens > micro_batch.width) | (actions > micro_batch.action_width)
        if too_long.any():
            row = int(np.argmax(too_long))
            sample = int(columns.sample_ids[micro_batch.samples[micro_batch.row_offsets[row]]])
            raise DataError(
                f"sample {sample} has {tokens[row]} tokens and {actions[row]} response tokens where the plan's rows hold "
                f"{micro_batch.width} and {micro_batch.action_width}",
                remedy="Plan with the lengths of the columns that are built",
            )
        return cls(micro_batch.samples, sample_rows, tokens, actions, micro_batch.width, micro_batch.action_width)

    @property
    def action_shape(self) -> tuple[int, int]:
        return len(self.actions), self.action_width

    def action_pieces(self, columns: SampleColumns) -> dict[str, IntArray]:
        """The samples' responses as pieces: where each starts on the action axis, its length, and its place in rows of `action_shape`."""
        lengths = self.actions[self.sample_rows]
        places = (self.sample_rows + 1) * self.action_width - lengths
        return {"starts": columns.action_offsets[self.samples], "lengths": lengths, "places": places}

    @property
    def placement(self) -> Placement:
        """The places of the samples' tokens."""
        places = (self.sample_rows + 1) * self.width - self.tokens[self.sample_rows]
        return Placement(self.samples, places, (len(self.tokens), self.width))


def field_names(columns: SampleColumns) -> frozenset[str]:
    """Return the names of all fields that these columns have."""
    return frozenset(("input_ids", "attention_mask", "position_ids", *action_names(columns), *extra_names(columns)))


def action_names(columns: SampleColumns) -> tuple[str, ...]:
    """Return the names of the fields on the action axis that these columns have."""
    return ("response_mask", "loss_weight", *columns.columns)


def build_fields(columns: SampleColumns, rows: PaddedRows, pad_token_id: int, wanted: Container[str]) -> dict[str, AnyArray]:
    """Return the fields that are `wanted` and exist, each written once; shapes and dtypes as in `reference.build_fields`."""
    token_shape = (len(rows.tokens), rows.width)
    action_shape = (len(rows.actions), rows.action_width)
    fields: dict[str, AnyArray] = {}

    def make(name: str, shape: tuple[int, int], dtype: str) -> AnyArray:
        fields[name] = array = np.empty(shape, dtype=dtype)
        return array

    starts = (rows.width - rows.tokens)[:, None]
    column = np.arange(rows.width, dtype=np.int64)
    if "input_ids" in wanted:
        input_ids = make("input_ids", token_shape, "int64")
        input_ids.fill(pad_token_id)
        input_ids[column >= starts] = _concatenate_values(columns.input_ids, columns.token_offsets, rows.samples)
    if "attention_mask" in wanted:
        np.copyto(make("attention_mask", token_shape, "int64"), column >= starts)
    if "position_ids" in wanted:
        position_ids = make("position_ids", token_shape, "int64")
        np.subtract(column, starts, out=position_ids)
        np.maximum(position_ids, 0, out=position_ids)
    is_action = np.arange(rows.action_width, dtype=np.int64) >= (rows.action_width - rows.actions)[:, None]
    if "response_mask" in wanted:
        np.copyto(make("response_mask", action_shape, "int64"), is_action)
    present = narrow_columns(columns)
    for name, values in present.items():
        if name in wanted:
            dense = make(name, action_shape, "float32")
            dense.fill(0)
            dense[is_action] = _concatenate_values(values, columns.action_offsets, rows.samples)
    return fields


def _concatenate_values(values: AnyArray, offsets: IntArray, samples: IntArray) -> AnyArray:
    """Return the chosen samples' values one after another; a view if the samples are consecutive."""
    if len(samples) and (np.diff(samples) == 1).all():
        return values[offsets[samples[0]] : offsets[samples[-1] + 1]]
    return values[segment_indices(offsets, samples)]


def gather_index(rows: PaddedRows) -> GatherIndex:
    """Return the position that predicts each action token: token j of A_i is in column width - A_i + j, and is predicted one before."""
    lengths, actions = rows.tokens[rows.sample_rows], rows.actions[rows.sample_rows]
    offsets = offsets_of(actions)
    places = np.arange(offsets[-1], dtype=np.int64)
    columns = places + np.repeat(rows.width - actions - 1 - offsets[:-1], actions)
    row_of = np.repeat(rows.sample_rows, actions)
    first = offsets[:-1][lengths == actions]  # a response that begins its sample: nothing predicts its first token
    if len(first):
        places, row_of, columns = (np.delete(array, first) for array in (places, row_of, columns))
    return GatherIndex(places, row_of, columns)
