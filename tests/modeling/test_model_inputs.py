"""Rows of several sequences become one row of real tokens; the definition is a loop over rows, sequences and tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.errors import ContractError, UnsupportedError
from skyrl_engine.modeling.model_inputs import model_inputs


def pack(rows: list[list[int]], *, align: int = 1, before: int = 0, after: int = 0, **changed: Any) -> MicroBatch:
    """Rows of sequences of these lengths, each rounded up to `align`; position i of row r holds token 1000 r + i, gaps hold -1."""
    occupied = [[-(-length // align) * align for length in row] for row in rows]
    width = before + max(sum(row) for row in occupied) + after
    ids = torch.full((len(rows), width), -1)
    mask, places = torch.zeros_like(ids), torch.zeros_like(ids)
    scored = []
    for number, row in enumerate(rows):
        column = before
        for length, space in zip(row, occupied[number], strict=True):
            here = slice(column, column + length)
            ids[number, here] = 1000 * number + torch.arange(column, column + length)
            mask[number, here], places[number, here] = 1, torch.arange(length)
            scored += [number * width + column + place for place in range(length - 1)]
            column += space
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    positions = torch.tensor(scored[::-1], dtype=torch.int64)  # any order is allowed
    lengths = Ragged.from_list(rows, np.int64)
    return MicroBatch(
        **{"inputs": inputs, "positions": positions, "labels": positions, "sequence_lengths": lengths, "samples": None, **changed}
    )


@given(
    rows=st.lists(st.lists(st.integers(0, 7), max_size=5), min_size=1, max_size=4).filter(
        lambda rows: any(len(row) > 1 for row in rows)
    ),
    align=st.sampled_from([1, 2, 4]),
    before=st.integers(0, 2),
    after=st.integers(1, 3),
)
def test_real_tokens_alone_are_laid_end_to_end(rows: list[list[int]], align: int, before: int, after: int) -> None:
    batch = pack(rows, align=align, before=before, after=after)
    given_inputs = {name: tensor.clone() for name, tensor in batch.inputs.items()}
    arguments = model_inputs(batch)
    assert arguments.segments is not None
    documents = [length for row in rows for length in row if length]
    if not documents:
        assert arguments.segments.lengths == (1,)
        assert arguments.inputs["input_ids"].shape == (1, 1)
    else:
        assert arguments.segments.lengths == tuple(documents)
        ids = batch.inputs["input_ids"].flatten()
        assert arguments.inputs["input_ids"].tolist() == [ids[ids >= 0].tolist()]
        assert arguments.inputs["position_ids"].tolist() == [[place for length in documents for place in range(length)]]
    assert set(arguments.inputs) == {"input_ids", "position_ids"}
    for old, new in zip(batch.positions.tolist(), arguments.positions.tolist(), strict=True):
        assert arguments.inputs["input_ids"][0, new] == batch.inputs["input_ids"].flatten()[old]
    assert all(torch.equal(batch.inputs[name], tensor) for name, tensor in given_inputs.items())


def test_a_boolean_mask_is_left_alone() -> None:
    batch = pack([[0, 0]], after=3)
    mask = torch.zeros(1, 3, dtype=torch.bool)
    model_inputs(MicroBatch({**batch.inputs, "attention_mask": mask}, batch.positions, batch.labels, batch.sequence_lengths, None))
    assert not mask.any()


def test_places_are_counted_when_nobody_gives_them() -> None:
    batch = pack([[3, 2], [4]], align=4)
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "position_ids"}
    without = model_inputs(MicroBatch(inputs, batch.positions, batch.labels, batch.sequence_lengths, None))
    assert torch.equal(without.inputs["position_ids"], model_inputs(batch).inputs["position_ids"])


@pytest.mark.parametrize("rows", [[[4], [2], []], [[0]], [[]]])
def test_rows_of_one_sequence_stay_as_they_are(rows: list[list[int]]) -> None:
    batch = pack(rows, after=1)
    arguments = model_inputs(batch)
    assert arguments.segments is None
    assert arguments.inputs is batch.inputs
    assert arguments.positions is batch.positions


@pytest.mark.parametrize("rows", [[[3, 2]], [[5]]])
def test_inputs_that_the_model_would_ignore_are_refused(rows: list[list[int]]) -> None:
    batch = pack(rows)
    inputs = {**batch.inputs, "expert_routes": torch.zeros(1, 5, 2, 2)}
    with pytest.raises(UnsupportedError, match="rows carry expert_routes, which the backend does not give to its model"):
        model_inputs(MicroBatch(inputs, batch.positions, batch.labels, batch.sequence_lengths, None))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"sequence_lengths": Ragged.from_list([[3, 3]], np.int64)},
            r"marks \[5\] tokens per row, its sequence lengths add up to \[6\]",
        ),
        ({"sequence_lengths": Ragged.from_list([[3, 2], [0]], np.int64)}, r"marks \[5\] tokens"),
        ({"sequence_lengths": Ragged.from_list([[2, 3]], np.int64)}, "a gap inside sequence 1"),
        ({"sequence_lengths": Ragged.from_list([[4, 1]], np.int64)}, "a gap inside sequence 0"),
        ({"positions": torch.tensor([3])}, "scores a position without a token"),
    ],
)
def test_a_collator_that_contradicts_itself_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        model_inputs(pack([[3, 2]], align=4, **changed))
