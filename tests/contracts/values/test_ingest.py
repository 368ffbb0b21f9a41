"""Columns from lists, NumPy and torch: the same whichever way the numbers come, and a clear error for each thing that is wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import DataError
from skyrl_engine.testing.collators.strategies import SampleLists, sample_lists
from skyrl_engine.testing.error_checks import check_says_what_to_do


def require_same(one: SampleColumns, other: SampleColumns) -> None:
    for name in ("input_ids", "token_offsets", "action_offsets", "loss_weight", "sample_ids", "group_ids", "unit_ids"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype, name
        assert mine.tobytes() == theirs.tobytes(), name
    assert list(one.columns) == list(other.columns)
    for name, values in one.columns.items():
        assert values.dtype == np.float32
        assert values.tobytes() == other.columns[name].tobytes(), name


def as_numpy(rows, dtype):
    return [np.asarray(row, dtype=dtype) for row in rows]


def as_torch(rows, dtype):
    return [torch.tensor(row, dtype=dtype, requires_grad=dtype.is_floating_point) for row in rows]


@settings(deadline=None)
@given(sample_lists(), st.sampled_from(["numpy", "torch", "tuple", "read-only"]))
def test_every_container_gives_the_same_columns(lists: SampleLists, container: str):
    def whole(rows):
        match container:
            case "numpy":
                return as_numpy(rows, np.int64)
            case "torch":
                return as_torch(rows, torch.int64)
            case "tuple":
                return [tuple(row) for row in rows]
        arrays = as_numpy(rows, np.int64)
        for array in arrays:
            array.flags.writeable = False
        return arrays

    def real(rows):
        match container:
            case "torch":
                return as_torch(rows, torch.float32)
            case "tuple":
                return [tuple(row) for row in rows]
        return as_numpy(rows, np.float32)

    columns = SampleColumns.from_rollouts(
        prompts=whole(lists.prompts),
        responses=whole(lists.responses),
        loss_masks=real(lists.loss_masks),
        columns={name: real(rows) for name, rows in lists.columns.items()},
        **lists.ids,
    )
    require_same(columns, lists.to_columns())


@settings(deadline=None)
@given(sample_lists())
def test_both_entries_give_the_same_columns(lists: SampleLists):
    supervised = SampleColumns.from_lists(
        input_ids=[[*prompt, *response] for prompt, response in zip(lists.prompts, lists.responses, strict=True)],
        num_actions=[len(response) for response in lists.responses],
        loss_mask=lists.loss_masks,
        columns=lists.columns,
        **lists.ids,
    )
    require_same(supervised, lists.to_columns())


def test_ids_are_int32_where_they_fit_and_int64_otherwise():
    assert SampleColumns.from_lists(input_ids=[[1, 2**31 - 1]]).input_ids.dtype == np.int32
    large = SampleColumns.from_lists(input_ids=[[1], [2**31]]).input_ids
    assert large.dtype == np.int64
    assert large.tolist() == [1, 2**31]
    from_array = SampleColumns.from_lists(input_ids=[np.array([5], dtype=np.uint64), np.array([2**31], dtype=np.uint64)]).input_ids
    assert from_array.tolist() == [5, 2**31]
    assert SampleColumns.from_lists(input_ids=[np.array([0, 2**31 - 1])]).input_ids.dtype == np.int32


def test_any_iterable_of_numbers_is_a_row():
    columns = SampleColumns.from_lists(input_ids=[(1, 2), range(3, 6), iter([6, 7])], loss_mask=[(1,), (0.5, 1), iter([0])])
    assert columns.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert columns.loss_weight.tolist() == [1, 0.5, 1, 0]


def test_masks_of_zeros_and_ones_take_one_byte_and_fractions_are_kept():
    masks = [[0, 1, 1], [True, 0.0, 1.0], torch.tensor([False, True, True])]
    for mask in masks:
        assert SampleColumns.from_lists(input_ids=[[9, 8, 7, 6]], loss_mask=[mask]).loss_weight.dtype == np.uint8
    weight = SampleColumns.from_lists(input_ids=[[9, 8, 7, 6]], loss_mask=[[0.25, 1 / 3, -0.0]]).loss_weight
    assert weight.tobytes() == np.array([0.25, 1 / 3, -0.0], dtype=np.float32).tobytes()


def test_num_actions_may_be_left_out():
    by_mask = SampleColumns.from_lists(input_ids=[[1, 2, 3], [4, 5]], loss_mask=[[1], [0]])
    assert by_mask.lengths.actions.tolist() == [1, 1]
    everything = SampleColumns.from_lists(input_ids=[[1, 2, 3], [4, 5]])
    assert everything.lengths.actions.tolist() == [3, 2]
    assert everything.loss_weight.tolist() == [0, 1, 1, 0, 1], "position 0 has no predecessor"
    assert everything.unscored_first_tokens == 2


def test_bfloat16_tensors_are_read():
    values = torch.tensor([0.5, -1.5], dtype=torch.bfloat16, requires_grad=True)
    columns = SampleColumns.from_rollouts(prompts=[[1]], responses=[[2, 3]], rewards=[values])
    assert columns.columns["rewards"].tolist() == [0.5, -1.5]


def test_rollout_columns_are_named_for_losses():
    columns = SampleColumns.from_rollouts(
        prompts=[[1]], responses=[[2]], rewards=[[1.0]], logprobs=[[-0.5]], columns={"advantages": [[2.0]]}
    )
    assert {name: values.tolist() for name, values in columns.columns.items()} == {
        "rewards": [1.0],
        "rollout_logprobs": [-0.5],
        "advantages": [2.0],
    }
    assert not SampleColumns.from_rollouts(prompts=[[1]], responses=[[2]], rewards=None).columns


LISTS = {"input_ids": [[1, 2, 3], [4, 5, 6]], "num_actions": [2, 1], "loss_mask": [[1, 1], [1]]}
ROLLOUTS = {"prompts": [[1], [2]], "responses": [[3], [4, 5]]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_mask": [[1, 1], [1, 1]]}, ["sample 1", "2 values in loss_mask", "1 response tokens"]),
        ({"loss_mask": [[1, 1]]}, ["loss_mask has 1 rows for 2 samples"]),
        ({"loss_mask": [[1, 1], None]}, ["sample 1", "loss_mask", "missing"]),
        ({"loss_mask": [[1, 1], [float("nan")]]}, ["sample 1", "loss weight nan"]),
        ({"loss_mask": [[1, 1], ["x"]]}, ["sample 1", "loss_mask", "tensor of numbers per sample"]),
        ({"loss_mask": [[1, 10**400], [1]]}, ["loss_mask", "no float can hold"]),
        ({"input_ids": [[1, 2, 3], [4, 5.5, 6]]}, ["sample 1", "input_ids", "float", "tensor of whole numbers per sample"]),
        ({"input_ids": [[1, 2, 3], np.array([4.0, 5.0, 6.0])]}, ["sample 1", "input_ids", "float64"]),
        ({"input_ids": [[1, 2, 3], np.array([[4, 5, 6]])]}, ["sample 1", "input_ids", "shape [1, 3]"]),
        ({"input_ids": [[1, 2, 3], "abc"]}, ["sample 1", "input_ids", "str"]),
        ({"input_ids": [[1, 2, 3], 7]}, ["sample 1", "input_ids", "int"]),
        ({"input_ids": [[1, 2, 3], [4, -100, 6]]}, ["sample 1", "-100", "position 1"]),
        ({"input_ids": [[1, 2, 3], [4, 5, 2**63]]}, ["64 bits"]),
        ({"input_ids": [[1, 2, 3], []], "num_actions": [2, 0], "loss_mask": [[1, 1], []]}, ["sample 1", "no token"]),
        ({"num_actions": [2, 4], "loss_mask": [[1, 1], [1] * 4]}, ["sample 1", "more response tokens than tokens"]),
        ({"num_actions": [2, -1]}, ["sample 1", "negative", "num_actions"]),
        ({"num_actions": [2, 1.0]}, ["num_actions", "float64"]),
        ({"num_actions": [2]}, ["num_actions has 1 rows for 2 samples"]),
        ({"columns": {"rewards": [[1.0, 1.0], [1.0, 2.0]]}}, ["sample 1", "rewards"]),
        ({"columns": {"rewards": [[1.0, 1.0], ["good"]]}}, ["sample 1", "rewards"]),
        ({"columns": {"rewards": [[1.0, 1.0]]}}, ["rewards has 1 rows for 2 samples"]),
        ({"columns": {"input_ids": [[1.0, 1.0], [1.0]]}}, ["'input_ids'", "cannot be called"]),
        ({"sample_ids": np.array([3, 3])}, ["more than once"]),
    ],
    ids=str,
)
def test_errors_of_the_supervised_entry(changes, words):
    SampleColumns.from_lists(**LISTS)
    with pytest.raises(DataError) as caught:
        SampleColumns.from_lists(**{**LISTS, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    check_says_what_to_do(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"responses": [[3]]}, ["responses has 1 rows for 2 samples"]),
        ({"responses": [[3], [4, 0.5]]}, ["sample 1 has something in responses that"]),
        ({"prompts": [[1], [None]]}, ["sample 1 has something in prompts that"]),
        ({"prompts": [[1], []], "responses": [[3], []]}, ["sample 1", "no token"]),
        ({"loss_masks": [[1], [1, 1, 1]]}, ["sample 1", "3 values in loss_masks", "2 response tokens"]),
        ({"loss_masks": [[1]]}, ["loss_masks has 1 rows for 2 samples"]),
        ({"rewards": [[1.0], [1.0]]}, ["sample 1", "1 values in rewards", "2 response tokens"]),
        ({"rewards": [1.0, 2.0]}, ["sample 0", "rewards", "float"]),
        ({"logprobs": [[-1.0], []]}, ["sample 1", "rollout_logprobs"]),
        ({"rewards": [[1.0], [1.0, 2.0]], "columns": {"rewards": [[1.0], [1.0, 2.0]]}}, ["'rewards' is given twice"]),
    ],
    ids=str,
)
def test_errors_of_the_reinforcement_learning_entry(changes, words):
    SampleColumns.from_rollouts(**ROLLOUTS)
    with pytest.raises(DataError) as caught:
        SampleColumns.from_rollouts(**{**ROLLOUTS, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    check_says_what_to_do(caught.value)
