"""The definition of `packed`, one token at a time. The vectorized form next to it must give the same bytes, dtypes and shapes."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts import AnyArray, MicroBatchPlan, SampleColumns
from skyrl_engine_collators.extras_loops import PlacedExtras, build_extras, extras_of, forms_of


def build_fields(columns: SampleColumns, micro_batch: MicroBatchPlan, pad_token_id: int) -> dict[str, AnyArray]:
    """Every field of these rows.

    With K rows and W = width: `input_ids`, `attention_mask`, `position_ids` int64[K,W]; `loss_weight` and every column float32[K,W-1],
    where slot p belongs to the token in column p + 1, which column p predicts. Nothing is written for the first token of a sample.
    A column of k numbers per token is [K,W-1,k] of its own dtype. `extras_reference` says what there is of routes and images.
    """
    rows, width = micro_batch.rows, micro_batch.width
    input_ids: npt.NDArray[np.int64] = np.full((rows, width), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros((rows, width), dtype=np.int64)
    position_ids = np.zeros((rows, width), dtype=np.int64)
    sources = {"loss_weight": columns.loss_weight, **columns.columns}
    sources = dict(sorted(sources.items(), key=lambda item: item[1].ndim))  # wide ones after the others
    action_fields: dict[str, AnyArray] = {
        name: np.zeros((rows, width - 1, *values.shape[1:]), dtype=np.float32 if values.ndim == 1 else values.dtype)
        for name, values in sources.items()
    }
    for row, sample, begin in _place_samples(columns, micro_batch):
        first_token, tokens = int(columns.token_offsets[sample]), _tokens(columns, sample)
        first_action, actions = int(columns.action_offsets[sample]), _actions(columns, sample)
        for position in range(tokens):
            input_ids[row, begin + position] = columns.input_ids[first_token + position]
            attention_mask[row, begin + position] = 1
            position_ids[row, begin + position] = position
            action = position - (tokens - actions)
            if action >= 0 and position > 0:
                for name, values in sources.items():
                    action_fields[name][row, begin + position - 1] = values[first_action + action]
    placed = [PlacedExtras(row, begin, extras_of(columns, sample)) for row, sample, begin in _place_samples(columns, micro_batch)]
    extras = build_extras(forms_of(columns), placed, rows, width)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **action_fields, **extras}


def gather_index(columns: SampleColumns, micro_batch: MicroBatchPlan) -> list[tuple[int, int, int]]:
    """(action, row, column) of every action token that has a predecessor."""
    entries = []
    action = 0
    for row, sample, begin in _place_samples(columns, micro_batch):
        tokens, actions = _tokens(columns, sample), _actions(columns, sample)
        for position in range(tokens - actions, tokens):
            if position > 0:
                entries.append((action, row, begin + position - 1))
            action += 1
    return entries


def cu_seqlens(columns: SampleColumns, micro_batch: MicroBatchPlan) -> list[list[int]]:
    """Per row the column in which each sample begins, and the one after the last."""
    bounds = [[0] for _ in range(micro_batch.rows)]
    for row, sample, begin in _place_samples(columns, micro_batch):
        bounds[row].append(begin + _aligned_length(columns, micro_batch, sample))
    return bounds


def _place_samples(columns: SampleColumns, micro_batch: MicroBatchPlan) -> Iterator[tuple[int, int, int]]:
    """Row, sample and the column it begins in."""
    for row in range(micro_batch.rows):
        begin = 0
        for place in range(int(micro_batch.row_offsets[row]), int(micro_batch.row_offsets[row + 1])):
            sample = int(micro_batch.samples[place])
            yield row, sample, begin
            begin += _aligned_length(columns, micro_batch, sample)


def _aligned_length(columns: SampleColumns, micro_batch: MicroBatchPlan, sample: int) -> int:
    occupied = _tokens(columns, sample)
    while occupied % micro_batch.alignment:
        occupied += 1
    return occupied


def _tokens(columns: SampleColumns, sample: int) -> int:
    return int(columns.token_offsets[sample + 1] - columns.token_offsets[sample])


def _actions(columns: SampleColumns, sample: int) -> int:
    return int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
