"""Rows that hold lists of numbers per token, weights of their own, and values of samples; and units that are dropped whole."""

import numpy as np
import pytest

from skyrl_engine.data.preview import preview
from skyrl_engine.errors import DataError

ROLLOUT = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "loss_mask": [1, 0, 1]}
NEEDS = ("logprobs_at:ids", "numbers[k]")


@pytest.fixture
def read(load, make_tokenizer):
    return lambda rows, *needs, **settings: load(rows, make_tokenizer(None), columns=needs, **settings)


def test_lists_per_token_lie_on_the_action_axis(read):
    rows = [
        {**ROLLOUT, "ids": [[1, 2], [3, 4], [5, 6]], "numbers": [[-1, -2], [0, 0], [-3.5, -4]]},
        # of all tokens, and nothing where there is no loss
        {**ROLLOUT, "ids": [None, None, [7, 8], None, [9, 9]], "numbers": [None, None, [1, 2], None, [3, 4]]},
    ]
    dataset = read(rows, *NEEDS)
    ids, numbers = (dataset.columns.columns[name] for name in ("ids", "numbers"))
    assert (ids.dtype, numbers.dtype) == (np.int64, np.float32)
    assert ids.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [0, 0], [9, 9]]
    np.testing.assert_array_equal(numbers, [[-1, -2], [0, 0], [-3.5, -4], [1, 2], [np.nan, np.nan], [3, 4]])
    again = read(rows, *NEEDS)
    assert again.counts.from_cache
    np.testing.assert_array_equal(again.columns.columns["ids"], ids)
    seen = {column.name: column for column in preview(dataset, None, samples=0).columns}
    assert (seen["ids"].low, seen["ids"].high, seen["ids"].per_token) == (1, 9, 2)


def test_they_are_cut_with_their_tokens(read):
    rows = [{**ROLLOUT, "ids": [[1, 2], [3, 4], [5, 6]]}, {**ROLLOUT, "ids": [[1, 2], [3, 4], [5, 6]]}]
    dataset = read(rows, "logprobs_at:ids", max_length=4, overlong="truncate")
    assert dataset.columns.columns["ids"].tolist() == [[1, 2], [3, 4]] * 2


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"ids": [[1, 2], [3, 4]]}, "column 'ids': it has 2 values for 3 response tokens"),
        ({"ids": [[1, 2], [3, 4], [5]]}, "column 'ids': entry 2 has 1 numbers where others have 2"),
        ({"ids": [[1, 2], [3, 4], [5, 0.5]]}, "column 'ids': token ids are needed, not float64"),
        ({"ids": [1, 2, 3]}, "column 'ids': a list of numbers per token is needed"),
        ({"ids": 1}, "column 'ids': a list of numbers per token is needed"),
        ({"ids": [None, [3, 4], [5, 6]]}, r"column 'ids': \[-1, -1\] stands at token 2, which carries loss"),
        ({"ids": [[1, 2], [3, 4], [5, -6]]}, r"column 'ids': \[5, -6\] stands at token 4, which carries loss"),
        ({}, "sample 0 .* has no column 'ids', which data.columns names"),
    ],
)
def test_mistakes_are_named_with_their_place(read, row, cause):
    with pytest.raises(DataError, match=cause):
        read([{**ROLLOUT, **row}], "logprobs_at:ids")


TEACHER = {"teacher_ids": [[1, 2], [3, 4], [5, 6]], "teacher_logprobs": [[-1, -2], [0, -9], [-0.7, -0.69]]}


@pytest.mark.parametrize(
    ("column", "place", "entry", "cause"),
    [
        (
            "teacher_logprobs",
            2,
            [0.4, -2],
            "column 'teacher_logprobs': 0.4 stands at token 4, and no logarithm of a probability is above 0",
        ),
        (
            "teacher_logprobs",
            0,
            [-0.5, -0.6],
            "column 'teacher_logprobs': the probabilities at token 2 add up to 1.155, more than 1",
        ),
        ("teacher_ids", 2, [5, 5], "column 'teacher_ids': token id 5 is named twice at token 4"),
    ],
)
def test_what_no_teacher_can_have_said_is_refused_with_its_token(read, column, place, entry, cause):
    """Nobody looks at tokens without loss: token 3 of these rows."""
    needs = ("logprobs_at:teacher_ids", "teacher_logprobs[k]")
    read([{**ROLLOUT, **TEACHER}], *needs)
    wrong = [*TEACHER[column][:place], entry, *TEACHER[column][place + 1 :]]
    with pytest.raises(DataError, match=cause):
        read([{**ROLLOUT, **TEACHER}, {**ROLLOUT, **TEACHER, column: wrong}], *needs)
    unread = [TEACHER[column][0], entry, TEACHER[column][2]]
    read([{**ROLLOUT, **TEACHER, column: unread}], *needs)


def test_a_teacher_names_as_many_tokens_as_it_rates(read):
    row = {**ROLLOUT, **TEACHER, "teacher_logprobs": [[-1], [-1], [-1]]}
    with pytest.raises(DataError, match="it has 1 numbers per token, and teacher_ids has 2"):
        read([row], "logprobs_at:teacher_ids", "teacher_logprobs[k]")


def test_weights_of_tokens_and_of_samples_multiply_what_carries_loss(read):
    rows = [
        {**ROLLOUT, "loss_weight": [0.5, 9, 2]},
        {**ROLLOUT, "loss_weight": 0.25},
        ROLLOUT,
        {**ROLLOUT, "loss_weight": [0, 1, 1]},
    ]
    dataset = read(rows)
    assert dataset.columns.loss_weight.dtype == np.float32
    assert dataset.columns.loss_weight.tolist() == [0.5, 0, 2, 0.25, 0, 0.25, 1, 0, 1, 1]
    assert dataset.counts.loss_tokens == 7
    assert read([ROLLOUT, {**ROLLOUT, "loss_weight": 1}]).columns.loss_weight.dtype == np.uint8


def test_weights_that_are_no_numbers_are_refused(read):
    with pytest.raises(DataError, match=r"column 'loss_weight': nan stands at token 2, which carries loss"):
        read([{**ROLLOUT, "loss_weight": [None, 1, 1]}])
    with pytest.raises(DataError, match="column 'loss_weight': it has 2 values for 3 response tokens"):
        read([{**ROLLOUT, "loss_weight": [1, 1]}])


def test_values_of_samples_are_texts_or_numbers(read):
    rows = [{**ROLLOUT, "domain": "code", "difficulty": 2}, {**ROLLOUT, "domain": "chat", "difficulty": 0.5}]
    for _ in ("made", "from the cache"):
        values = read(rows, "sample:domain", "sample:difficulty").columns.sample_values
        assert values["domain"].tolist() == ["code", "chat"]
        assert values["difficulty"].tolist() == [2.0, 0.5]
        assert values["row"].tolist() == [0, 1]
    with pytest.raises(DataError, match=r"sample 1 .* has no column 'domain'"):
        read([rows[0], ROLLOUT], "sample:domain")
    with pytest.raises(DataError, match=r"column 'domain': .* stands here, and domain of others is a text"):
        read([rows[0], {**ROLLOUT, "domain": 3}], "sample:domain")


def test_a_unit_is_dropped_whole(read):
    """One of four pairs has an over-long half, one a half without loss; their other halves say nothing alone."""
    long = {**ROLLOUT, "response_ids": [7] * 9, "loss_mask": [1] * 9}
    silent = {**ROLLOUT, "loss_mask": [0, 0, 0]}
    halves = [ROLLOUT, long, silent, ROLLOUT, ROLLOUT, ROLLOUT, ROLLOUT, ROLLOUT]
    rows = [{**row, "unit_ids": number // 2} for number, row in enumerate(halves)]
    for _ in ("made", "from the cache"):
        dataset = read(rows, max_length=6, overlong="drop")
        assert dataset.columns.sample_values["row"].tolist() == [4, 5, 6, 7]
        assert dataset.columns.unit_ids.tolist() == [2, 2, 3, 3]
        counts = dataset.counts
        assert (counts.rows, counts.samples, counts.dropped_overlong, counts.dropped_without_loss) == (8, 4, 1, 1)
        assert (counts.dropped_with_unit, counts.dropped, counts.tokens, counts.loss_tokens) == (2, 4, 20, 8)
    apart = read([{key: value for key, value in row.items() if key != "unit_ids"} for row in rows], max_length=6, overlong="drop")
    assert (len(apart), apart.counts.dropped_with_unit) == (6, 0)


def test_nothing_left_of_all_units_is_said(read):
    rows = [{**ROLLOUT, "unit_ids": "a"}, {**ROLLOUT, "loss_mask": [0, 0, 0], "unit_ids": "a"}]
    with pytest.raises(DataError, match="1 had no token that carries loss, 1 lost another of their unit"):
        read(rows)
