"""Columns of several numbers per response token: lists, arrays and tensors give the same, and each mistake names its sample."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from skyrl_engine.contracts import Ragged, SampleColumns
from skyrl_engine.contracts.kinds.needs import column_forms, model_score
from skyrl_engine.errors import DataError

IDS = [[[1, 2], [3, 4]], [], [[5, 6]]]
NUMBERS = [[[-1.0, -2], [0, -4]], [], [[-5, -6]]]


def make_columns(**columns: Any) -> SampleColumns:
    return SampleColumns.from_rollouts(prompts=[[1], [2], [3]], responses=[[4, 5], [], [6]], columns=columns)


@pytest.mark.parametrize(
    "form",
    [list, np.asarray, lambda row: torch.tensor(row) if row else torch.zeros(0, 2).long()],
    ids=["lists", "arrays", "tensors"],
)
def test_token_ids_stay_integers_and_numbers_become_float32(form: Any) -> None:
    columns = make_columns(ids=[form(row) for row in IDS], numbers=NUMBERS).columns
    assert columns["ids"].dtype == np.int64
    assert columns["ids"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert columns["numbers"].dtype == np.float32
    assert columns["numbers"].tolist() == [[-1, -2], [0, -4], [-5, -6]]


def test_negative_whole_numbers_are_no_ids() -> None:
    assert make_columns(x=[[[0, -1], [-2, 0]], [], [[0, 0]]]).columns["x"].dtype == np.float32


def test_choosing_samples_chooses_their_entries() -> None:
    columns = make_columns(ids=IDS, numbers=NUMBERS).take([2, 1, 0])
    assert columns.columns["ids"].tolist() == [[5, 6], [1, 2], [3, 4]]
    assert columns.columns["numbers"].tolist() == [[-5, -6], [-1, -2], [0, -4]]


def test_arrow_tables_hold_nested_lists() -> None:
    table = pa.table({"input_ids": [[1, 4, 5], [2], [3, 6]], "num_actions": [2, 0, 1], "ids": IDS, "numbers": NUMBERS})
    columns = SampleColumns.from_arrow(table, columns=["ids", "numbers"]).columns
    for name, values in make_columns(ids=IDS, numbers=NUMBERS).columns.items():
        np.testing.assert_array_equal(columns[name], values)
        assert columns[name].dtype == values.dtype


def test_columns_are_put_beside_others() -> None:
    wide = Ragged(np.zeros((3, 4), np.float32), np.array([0, 2, 2, 3]))
    assert make_columns(ids=IDS).with_columns({"more": wide}).columns["more"].shape == (3, 4)


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([[[1, 2], [3, 4]], [], [[5]]], "sample 2 has 1 numbers per token in x, others 2"),
        ([[[1, 2], [3]], [], [[5, 6]]], "sample 0 has something in x that is no list of equally many numbers per token"),
        ([[[1, 2]], [], [[5, 6]]], "sample 0 has 1 entries in x for 2 response tokens"),
        ([[["a", "b"], ["c", "d"]], [], [["e", "f"]]], "sample 0 has something in x"),
        ([[[1, 2], [3, 4]], []], "x has 2 rows for 3 samples"),
    ],
)
def test_mistakes_name_sample_and_column(rows: list[Any], cause: str) -> None:
    with pytest.raises(DataError, match=cause):
        make_columns(x=rows)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (np.zeros((2, 2), np.float32), r"column 'x' has shape \[2, 2\] where the samples have 3 response tokens"),
        (np.zeros((3, 0), np.float32), r"column 'x' has shape \[3, 0\]"),
        (np.zeros((3, 2)), "column 'x' must be float32, or int32 or int64 token ids, not float64"),
        (np.full((3, 2), -1), "column 'x' holds the negative token id -1"),
    ],
)
def test_flat_arrays_are_checked(values: Any, cause: str) -> None:
    with pytest.raises(DataError, match=cause):
        make_columns().with_columns({"x": values})


def test_the_names_of_needs() -> None:
    needs = ("logprobs", "advantages", "logprobs_at:ids", "numbers[k]", "sample:domain", "ids[k]")
    assert [model_score(need) for need in needs] == ["logprobs", None, "logprobs_at", None, None, None]
    assert column_forms(needs) == {"advantages": "number", "numbers": "numbers", "ids": "token ids"}
    assert column_forms(("x", "x[k]")) == {"x": "numbers"}
