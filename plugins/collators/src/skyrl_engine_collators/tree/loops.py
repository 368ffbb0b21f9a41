"""The definition of `tree`, one token at a time. The form in `layout.py` next to it must give the same bytes, dtypes and shapes."""

import numpy as np

from skyrl_engine.contracts import AnyArray, MicroBatchPlan, SampleColumns

Path = list[int]
"""The column of every token of a sample."""


def build_fields(columns: SampleColumns, micro_batch: MicroBatchPlan, pad_token_id: int) -> dict[str, AnyArray]:
    """Every field of these rows.

    With K rows, W = width and A = action_width: `input_ids`, `attention_mask`, `position_ids` int64[K,W], a shared token once;
    `loss_weight` and every column float32[K,A], the response tokens of the row's samples one after the other. A column of k numbers per token
    is [K,A,k] of its own dtype.
    """
    rows, width, action_width = micro_batch.rows, micro_batch.width, micro_batch.action_width
    token_fields: dict[str, AnyArray] = {
        "input_ids": np.full((rows, width), pad_token_id, dtype=np.int64),
        "attention_mask": np.zeros((rows, width), dtype=np.int64),
        "position_ids": np.zeros((rows, width), dtype=np.int64),
    }
    sources = {"loss_weight": columns.loss_weight, **columns.columns}
    sources = dict(sorted(sources.items(), key=lambda item: item[1].ndim))  # wide ones after the others
    action_fields: dict[str, AnyArray] = {
        name: np.zeros((rows, action_width, *values.shape[1:]), dtype=np.float32 if values.ndim == 1 else values.dtype)
        for name, values in sources.items()
    }
    for row in range(rows):
        slot = 0
        for sample, path in _list_paths(columns, micro_batch, row):
            for position, column in enumerate(path):
                token_fields["input_ids"][row, column] = columns.input_ids[columns.token_offsets[sample] + position]
                token_fields["attention_mask"][row, column] = 1
                token_fields["position_ids"][row, column] = position
            for action in range(int(columns.action_offsets[sample]), int(columns.action_offsets[sample + 1])):
                for name, values in sources.items():
                    action_fields[name][row, slot] = values[action]
                slot += 1
    return {**token_fields, **action_fields}


def gather_index(columns: SampleColumns, micro_batch: MicroBatchPlan) -> list[tuple[int, int, int]]:
    """(action, row, column) of every action token that has a predecessor."""
    entries = []
    action = 0
    for row in range(micro_batch.rows):
        for sample, path in _list_paths(columns, micro_batch, row):
            actions = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
            for position in range(len(path) - actions, len(path)):
                if position > 0:
                    entries.append((action, row, path[position - 1]))
                action += 1
    return entries


def prefix_tree(columns: SampleColumns, micro_batch: MicroBatchPlan, row: int) -> tuple[list[int], list[int], list[int]]:
    """Lengths and parents of the segments of a row, and the last segment of each sample.

    A segment are neighbouring columns of one path that the same samples hold.
    """
    held_by: list[set[int]] = []
    before: list[int] = []  # the column of the token before, -1 where there is none
    paths = [path for _, path in _list_paths(columns, micro_batch, row)]
    for number, path in enumerate(paths):
        for position, column in enumerate(path):
            if column == len(held_by):
                held_by.append(set())
                before.append(path[position - 1] if position else -1)
            held_by[column].add(number)
    segment_of: list[int] = []
    lengths: list[int] = []
    parents: list[int] = []
    for column, (holders, predecessor) in enumerate(zip(held_by, before, strict=True)):
        if predecessor >= 0 and predecessor == column - 1 and held_by[predecessor] == holders:
            lengths[-1] += 1
        else:
            lengths.append(1)
            parents.append(segment_of[predecessor] if predecessor >= 0 else -1)
        segment_of.append(len(lengths) - 1)
    return lengths, parents, [segment_of[path[-1]] for path in paths]


def _list_paths(columns: SampleColumns, micro_batch: MicroBatchPlan, row: int) -> list[tuple[int, Path]]:
    """Return the samples of a row, each with its path: the shared part of the one before, then columns of its own."""
    paths: list[tuple[int, Path]] = []
    column = 0
    for place in range(int(micro_batch.row_offsets[row]), int(micro_batch.row_offsets[row + 1])):
        sample = int(micro_batch.samples[place])
        shared = 0 if micro_batch.shared is None else int(micro_batch.shared[place])
        path = paths[-1][1][:shared] if paths else []
        while len(path) < int(columns.token_offsets[sample + 1] - columns.token_offsets[sample]):
            path.append(column)
            column += 1
        paths.append((sample, path))
    return paths
