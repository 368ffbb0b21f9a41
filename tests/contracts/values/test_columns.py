"""SampleColumns: what `create` checks, what it leaves alone, and choosing samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.errors import DataError
from skyrl_engine.testing.collators.strategies import sample_columns
from skyrl_engine.testing.error_checks import check_says_what_to_do

FLAT = {
    "input_ids": np.array([1, 2, 3, 4, 5], dtype=np.int32),
    "token_offsets": offsets_of([3, 2]),
    "action_offsets": offsets_of([1, 2]),
}


def test_arrays_that_fit_are_not_copied():
    weight, rewards = np.array([1, 0, 1], dtype=np.uint8), np.zeros(3, dtype=np.float32)
    ids = {name: np.array([4, 5]) for name in ("sample_ids", "group_ids", "unit_ids", "trajectory_ids")}
    columns = SampleColumns.create(**FLAT, loss_weight=weight, columns={"rewards": rewards}, **ids)
    assert columns.input_ids is FLAT["input_ids"]
    assert columns.loss_weight is weight
    assert columns.columns["rewards"] is rewards
    assert all(getattr(columns, name) is array for name, array in ids.items())


def test_true_and_false_are_weights_of_one_byte():
    columns = SampleColumns.create(**FLAT, loss_weight=np.array([True, False, True]))
    assert columns.loss_weight.dtype == np.uint8
    assert columns.loss_weight.tolist() == [1, 0, 1]


def test_ids_that_repeat_are_named_as_far_as_five():
    twice = np.repeat(np.arange(10, 17), 2)
    with pytest.raises(DataError, match=r"more than once: \[10, 11, 12, 13, 14\]\. "):
        SampleColumns.from_lists(input_ids=[[1]] * len(twice), sample_ids=twice)


def test_the_first_token_of_a_sample_is_never_scored():
    """Nothing predicts it, so its weight is 0 from the start; the caller's array stays as it was."""
    weight = np.array([0.5, -0.0, 0.25], dtype=np.float32)
    columns = SampleColumns.create(**FLAT, loss_weight=weight)
    assert columns.loss_weight.tobytes() == np.array([0.5, 0.0, 0.25], dtype=np.float32).tobytes()
    assert columns.unscored_first_tokens == 0, "-0.0 weighed nothing"
    weight[1] = 2.0
    columns = SampleColumns.create(**FLAT, loss_weight=weight)
    assert columns.loss_weight.tolist() == [0.5, 0.0, 0.25]
    assert columns.unscored_first_tokens == 1
    assert weight[1] == 2.0


def test_defaults():
    columns = SampleColumns.create(**FLAT)
    assert columns.loss_weight.dtype == np.uint8
    assert columns.loss_weight.tolist() == [1, 0, 1]
    for ids in (columns.sample_ids, columns.group_ids, columns.unit_ids, columns.trajectory_ids):
        assert ids.tolist() == [0, 1]


def test_trajectory_ids_go_where_their_samples_go():
    """Stretches of one attempt stay that: chosen, with other columns, and in what planning sees."""
    columns = SampleColumns.create(**FLAT, trajectory_ids=np.array([7, 3]))
    chosen = columns.take([1, 0, 1])
    assert chosen.trajectory_ids.tolist() == [3, 7, 3]
    assert chosen.lengths.trajectory_ids.tolist() == [3, 7, 3]
    assert columns.with_columns({"rewards": np.zeros(3, dtype=np.float32)}).trajectory_ids.tolist() == [7, 3]
    assert SampleColumns.from_lists(input_ids=[[1], [2]], trajectory_ids=np.array([5, 5])).trajectory_ids.tolist() == [5, 5]
    assert SampleColumns.create(**FLAT).lengths.trajectory_ids.tolist() == [0, 1]


def test_ids_may_be_lists():
    columns = SampleColumns.create(**FLAT, group_ids=[7, 7], trajectory_ids=(3, 4))
    assert (columns.group_ids.tolist(), columns.group_ids.dtype) == ([7, 7], np.int64)
    assert columns.trajectory_ids.tolist() == [3, 4]


def test_columns_know_whether_group_ids_were_given():
    """Every sample a group of its own, as the caller says or because nobody said: the two are not the same."""
    alone, grouped = SampleColumns.create(**FLAT), SampleColumns.create(**FLAT, group_ids=np.array([0, 1]))
    assert alone.group_ids.tolist() == grouped.group_ids.tolist()
    assert (alone.grouped, grouped.grouped) == (False, True)
    assert (alone.take([1]).grouped, grouped.take([1]).grouped) == (False, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_offsets": np.array([0, 3, 5], dtype=np.int32)}, ["token_offsets must be int64[N+1], not int32[3]"]),
        ({"token_offsets": np.array([[0, 3, 5]])}, ["token_offsets must be int64[N+1], not int64[1, 3]"]),
        ({"token_offsets": np.zeros(0, dtype=np.int64)}, ["token_offsets must be int64[N+1], not int64[0]"]),
        ({"token_offsets": np.array([0, 3, 4])}, ["token_offsets", "rise from 0 to 5"]),
        ({"token_offsets": np.array([0, 6, 5])}, ["token_offsets", "rise"]),
        ({"token_offsets": np.array([1, 2, 4, 6])}, ["token_offsets must rise from 0 to 5", "it goes from 1 to 6"]),
        ({"action_offsets": np.array([1, 2, 3])}, ["action_offsets must rise from 0 to 3", "it goes from 1 to 3"]),
        ({"action_offsets": np.array([0, 3])}, ["action_offsets describe 1 samples, token_offsets 2"]),
        ({"token_offsets": np.array([0, 5, 5])}, ["sample 1 has no token"]),
        ({"action_offsets": offsets_of([4, 0])}, ["sample 0 has more response tokens"]),
        ({"input_ids": np.array([1, 2, 3, 4, 5], dtype=np.float32)}, ["input_ids", "float32"]),
        ({"input_ids": np.array([1, 2, 3, 4, -1])}, ["sample 1", "-1", "position 1"]),
        ({"input_ids": np.array([1, 2, 3, -4, 5])}, ["sample 1", "-4", "position 0"]),
        ({"loss_weight": np.ones(2, dtype=np.uint8)}, ["loss_weight", "[2]", "3 response tokens"]),
        ({"loss_weight": np.ones(3)}, ["loss_weight", "float64"]),
        ({"loss_weight": np.array([1, 0, 2], dtype=np.uint8)}, ["sample 1", "weight 2", "response token 1"]),
        ({"loss_weight": np.array([np.inf, 0, 0], dtype=np.float32)}, ["sample 0", "weight inf"]),
        ({"columns": {"rewards": np.zeros(2, dtype=np.float32)}}, ["'rewards'", "[2]"]),
        ({"columns": {"advantages": np.zeros(3)}}, ["'advantages'", "float64"]),
        ({"columns": {"rewards": np.zeros(3, dtype=np.float16)}}, ["'rewards'", "float16"]),
        ({"columns": {"loss_weight": np.zeros(3, dtype=np.float32)}}, ["cannot be called 'loss_weight'"]),
        ({"sample_ids": np.array([4, 4])}, ["[4]"]),
        ({"sample_ids": np.array([4, -1])}, ["sample 1", "negative"]),
        ({"group_ids": np.array([0.0, 1.0])}, ["group_ids must be 2 integers, not float64"]),
        ({"trajectory_ids": np.array([0])}, ["trajectory_ids must be 2 integers, not int64[1]"]),
        ({"unit_ids": np.array([0])}, ["unit_ids must be 2 integers"]),
        ({"group_ids": ["a", "b"]}, ["group_ids must be 2 integers"]),
        ({"group_ids": [0, 1, 2]}, ["group_ids must be 2 integers", "[3]"]),
        ({"sample_values": {"score": np.zeros(3)}}, ["'score'", "3 entries for 2"]),
        ({"extras": {"images": Ragged(np.zeros(1), offsets_of([1]))}}, ["'images'", "1 entries for 2"]),
    ],
    ids=str,
)
def test_errors(changes, words):
    with pytest.raises(DataError) as caught:
        SampleColumns.create(**{**FLAT, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    check_says_what_to_do(caught.value)


def test_further_columns_stand_beside_those_there_are():
    """One value per response token, flat or as one row per sample; a column of the same name gives way, and the samples stay as they were."""
    before = SampleColumns.create(**FLAT, columns={"rewards": np.zeros(3, dtype=np.float32), "kept": np.ones(3, dtype=np.float32)})
    after = before.with_columns(
        {"old_logprobs": Ragged.from_list([[-0.5], [-0.25, -0.125]], np.float32), "rewards": np.full(3, 2, dtype=np.float32)}
    )
    assert {name: values.tolist() for name, values in after.columns.items()} == {
        "rewards": [2, 2, 2],
        "kept": [1, 1, 1],
        "old_logprobs": [-0.5, -0.25, -0.125],
    }
    assert after.input_ids is before.input_ids
    assert after.action_offsets is before.action_offsets
    assert sorted(before.columns) == ["kept", "rewards"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.zeros(2, dtype=np.float32), ["'old_logprobs'", "[2]"]),
        (np.zeros(3), ["'old_logprobs'", "float64"]),
        (Ragged.from_list([[0.0], [0.0, 0.0]], np.float64), ["'old_logprobs'", "float64"]),
        (
            Ragged.from_list([[0.0, 0.0], [0.0]], np.float32),
            [
                "column 'old_logprobs' has other numbers of response tokens than the samples. ",
                "Give one value per response token of every sample, in the order of the samples",
            ],
        ),
    ],
    ids=["too-few", "float64", "ragged-float64", "other-lengths"],
)
def test_a_further_column_that_does_not_fit_is_refused(values, words):
    with pytest.raises(DataError) as caught:
        SampleColumns.create(**FLAT).with_columns({"old_logprobs": values})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    check_says_what_to_do(caught.value)


@settings(deadline=None)
@given(sample_columns(), st.data())
def test_take_is_each_chosen_sample(columns, data):
    chosen = data.draw(st.lists(st.integers(0, len(columns) - 1)))
    taken = columns.take(chosen)
    assert len(taken) == len(chosen)
    assert taken.sample_ids.tolist() == columns.sample_ids[chosen].tolist()
    for place, sample in enumerate(chosen):
        for offsets, values in (
            ("token_offsets", [columns.input_ids]),
            ("action_offsets", [columns.loss_weight, *columns.columns.values()]),
        ):
            source, target = getattr(columns, offsets), getattr(taken, offsets)
            mine = [taken.input_ids] if offsets == "token_offsets" else [taken.loss_weight, *taken.columns.values()]
            for before, after in zip(values, mine, strict=True):
                expected = before[source[sample] : source[sample + 1]]
                assert after[target[place] : target[place + 1]].tobytes() == expected.tobytes()
