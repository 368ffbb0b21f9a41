"""The definition of `padded`, one token at a time. The vectorized form next to it must give the same bytes, dtypes and shapes.

`build_fields` starts from columns, `from_lists` and `from_rollouts` from the Python lists that a caller had; all are plain loops.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts import AnyArray, MicroBatchPlan, SampleColumns
from skyrl_engine_collators.extras_loops import PlacedExtras, build_extras, extras_of, forms_of

Number = float | np.float32


@frozen
class Sample:
    """One sample as lists: its tokens, how many of them are the response, numbers (or lists of them) per response token, and its extras."""

    input_ids: Sequence[int]
    num_actions: int
    action_fields: Mapping[str, Sequence[Any]]
    extras: Mapping[str, AnyArray]


@frozen
class ActionField:
    """A field of the response: float32[R,A], or [R,A,width] of `dtype`."""

    width: int | None = None
    dtype: type[np.generic] = np.float32

    @classmethod
    def of_column(cls, values: AnyArray) -> "ActionField":
        return cls() if values.ndim == 1 else cls(values.shape[1], values.dtype.type)

    def zeros(self, rows: int, action_width: int) -> AnyArray:
        shape = (rows, action_width) if self.width is None else (rows, action_width, self.width)
        return np.zeros(shape, dtype=self.dtype)


def build_fields(columns: SampleColumns, micro_batch: MicroBatchPlan, pad_token_id: int) -> dict[str, AnyArray]:
    """Every field of these rows.

    With R rows, T = width and A = action_width: `input_ids`, `attention_mask`, `position_ids` int64[R,T]; `response_mask` int64[R,A];
    `loss_weight` and every column float32[R,A], a column of k numbers per token [R,A,k] of its own dtype; `extras_reference` says what there
    is of routes and images. A row without sample is padding throughout.
    """
    samples: list[Sample | None] = []
    for row in range(micro_batch.rows):
        members = micro_batch.samples[micro_batch.row_offsets[row] : micro_batch.row_offsets[row + 1]]
        samples.append(_read_sample(columns, int(members[0])) if len(members) else None)
    fields = {"loss_weight": ActionField(), **{name: ActionField.of_column(values) for name, values in columns.columns.items()}}
    return _build_dense(samples, fields, forms_of(columns), micro_batch.width, micro_batch.action_width, pad_token_id)


def gather_index(columns: SampleColumns, micro_batch: MicroBatchPlan) -> list[tuple[int, int, int]]:
    """(action, row, column) of every action token that has a predecessor."""
    entries = []
    action = 0
    for row in range(micro_batch.rows):
        for sample in micro_batch.samples[micro_batch.row_offsets[row] : micro_batch.row_offsets[row + 1]]:
            length = int(columns.token_offsets[sample + 1] - columns.token_offsets[sample])
            actions = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
            for position in range(length - actions, length):
                if position > 0:
                    entries.append((action, row, micro_batch.width - length + position - 1))
                action += 1
    return entries


def from_lists(
    *,
    input_ids: Sequence[Sequence[int]],
    num_actions: Sequence[int],
    loss_mask: Sequence[Sequence[Number]],
    columns: Mapping[str, Sequence[Sequence[Any]]],
    pad_token_id: int,
    routes: Sequence[AnyArray] | None = None,
) -> dict[str, AnyArray]:
    """Every field of a supervised batch, one row per sample, from the lists of `SampleColumns.from_lists`."""
    samples = []
    for i in range(len(input_ids)):
        weights = _zero_first_weight(loss_mask[i], scores_first_token=num_actions[i] == len(input_ids[i]))
        fields = {"loss_weight": weights, **{name: columns[name][i] for name in columns}}
        samples.append(Sample(input_ids[i], num_actions[i], fields, {} if routes is None else {"expert_routes": routes[i]}))
    return _collate(samples, {"loss_weight": ActionField(), **_fields_of_lists(columns)}, routes, pad_token_id)


def from_rollouts(
    *,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[Number]],
    columns: Mapping[str, Sequence[Sequence[Any]]],
    pad_token_id: int,
    routes: Sequence[AnyArray] | None = None,
) -> dict[str, AnyArray]:
    """Every field of a reinforcement-learning batch, one row per sample, from the lists of `SampleColumns.from_rollouts`."""
    samples = []
    for i in range(len(prompts)):
        weights = _zero_first_weight(loss_masks[i], scores_first_token=len(prompts[i]) == 0)
        fields = {"loss_weight": weights, **{name: columns[name][i] for name in columns}}
        extras = {} if routes is None else {"expert_routes": routes[i]}
        samples.append(Sample([*prompts[i], *responses[i]], len(responses[i]), fields, extras))
    return _collate(samples, {"loss_weight": ActionField(), **_fields_of_lists(columns)}, routes, pad_token_id)


def _fields_of_lists(columns: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, ActionField]:
    """A column is wide where its first token has a list, and of token ids where no number is a fraction or negative."""
    fields = {}
    for name, rows in columns.items():
        entries = [entry for row in rows for entry in row]
        if not entries or not isinstance(entries[0], list):
            fields[name] = ActionField()
            continue
        whole = all(isinstance(number, int) and number >= 0 for entry in entries for number in entry)
        fields[name] = ActionField(len(entries[0]), np.int64 if whole else np.float32)
    return fields


def _zero_first_weight(weights: Sequence[Number], *, scores_first_token: bool) -> list[Number]:
    """The weights, with 0 for a token at position 0 of its sample: nothing predicts it."""
    return [0.0 if scores_first_token and place == 0 else weight for place, weight in enumerate(weights)]


def _read_sample(columns: SampleColumns, sample: int) -> Sample:
    tokens = range(columns.token_offsets[sample], columns.token_offsets[sample + 1])
    actions = range(columns.action_offsets[sample], columns.action_offsets[sample + 1])
    fields = {"loss_weight": columns.loss_weight, **columns.columns}
    return Sample(
        [int(columns.input_ids[place]) for place in tokens],
        len(actions),
        {name: [values[place] for place in actions] for name, values in fields.items()},
        extras_of(columns, sample),
    )


def _collate(
    samples: Sequence[Sample], fields: Mapping[str, ActionField], routes: Sequence[AnyArray] | None, pad_token_id: int
) -> dict[str, AnyArray]:
    width = action_width = 0
    for sample in samples:
        width = max(width, len(sample.input_ids))
        action_width = max(action_width, sample.num_actions)
    forms = {} if routes is None else {"expert_routes": np.zeros((0, *routes[0].shape[1:]), dtype=_choose_dtype(routes))}
    return _build_dense(samples, fields, forms, max(width, 1), action_width, pad_token_id)


def _choose_dtype(routes: Sequence[AnyArray]) -> type[np.generic]:
    """The smallest dtype that holds every expert of every sample, and those on padding."""
    largest = routes[0].shape[-1] - 1
    for sample in routes:
        for expert in sample.flatten().tolist():
            largest = max(largest, expert)
    return np.uint8 if largest < 256 else np.int16 if largest < 32768 else np.int32


def _build_dense(
    samples: Sequence[Sample | None],
    fields: Mapping[str, ActionField],
    forms: Mapping[str, AnyArray],
    width: int,
    action_width: int,
    pad_token_id: int,
) -> dict[str, AnyArray]:
    input_ids: npt.NDArray[np.int64] = np.full((len(samples), width), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros((len(samples), width), dtype=np.int64)
    position_ids = np.zeros((len(samples), width), dtype=np.int64)
    response_mask = np.zeros((len(samples), action_width), dtype=np.int64)
    names = sorted(fields, key=lambda name: fields[name].width is not None)  # wide ones after the others
    action_fields = {name: fields[name].zeros(len(samples), action_width) for name in names}
    placed = []
    for row, sample in enumerate(samples):
        if sample is None:
            continue
        placed.append(PlacedExtras(row, width - len(sample.input_ids), sample.extras))
        for position, token in enumerate(sample.input_ids):
            column = width - len(sample.input_ids) + position
            input_ids[row, column] = token
            attention_mask[row, column] = 1
            position_ids[row, column] = position
        for place in range(sample.num_actions):
            column = action_width - sample.num_actions + place
            response_mask[row, column] = 1
            for name in names:
                action_fields[name][row, column] = sample.action_fields[name][place]
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "response_mask": response_mask,
        **action_fields,
        **build_extras(forms, placed, len(samples), width),
    }
