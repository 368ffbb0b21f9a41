"""Columns of rows in addition to their tokens: laid on the action axis, cut with the tokens, and every mistake named with its place."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import load_columns
from skyrl_engine.data.sources.rows import Row
from skyrl_engine.data.table.sample_columns import ColumnReader
from skyrl_engine.data.text.tokenization import TokenizedSample
from skyrl_engine.errors import DataError

ROLLOUT = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "loss_mask": [1, 0, 1]}
ADVANTAGES = {"advantages": "loss mine needs"}


def read_carried(dataset, name, sample=0):
    columns = dataset.columns
    return columns.columns[name][columns.action_offsets[sample] : columns.action_offsets[sample + 1]].tolist()


def needing(load, tokenizer, rows, *names, **settings):
    return load(rows, tokenizer, columns=names, **settings)


def test_rollouts_are_recognised_and_prompt_carries_no_loss(load, make_tokenizer):
    rows = [ROLLOUT, {"prompt_token_ids": [1], "response_token_ids": [2, 3]}, {"prompt_ids": [], "response_ids": [4, 5, 6]}]
    dataset = load(rows, make_tokenizer(None))
    columns = dataset.columns
    assert dataset.format == "rollouts"
    assert np.diff(columns.token_offsets).tolist() == [5, 3, 3]
    assert columns.input_ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert np.diff(columns.action_offsets).tolist() == [3, 2, 2], "the first token of a sample is never scored"
    assert columns.loss_weight.tolist() == [1, 0, 1, 1, 1, 1, 1]
    assert dataset.counts.tokens == 11
    assert dataset.counts.loss_tokens == 6
    assert not columns.columns


def test_a_list_is_of_the_response_or_of_all_tokens_and_a_number_of_every_response_token(load, make_tokenizer):
    rows = [
        {**ROLLOUT, "advantages": [0.5, 1.5, -2]},
        {**ROLLOUT, "advantages": [None, None, 0.5, None, -2]},
        {**ROLLOUT, "advantages": -3},
        {"prompt_ids": [], "response_ids": [1, 2, 3], "advantages": [9, 0.5, 1]},
    ]
    dataset = needing(load, make_tokenizer(None), rows, "advantages")
    assert dataset.columns.columns["advantages"].dtype == np.float32
    assert read_carried(dataset, "advantages", 0) == [0.5, 1.5, -2]
    np.testing.assert_array_equal(read_carried(dataset, "advantages", 1), [0.5, np.nan, -2])
    assert read_carried(dataset, "advantages", 2) == [-3, -3, -3]
    assert read_carried(dataset, "advantages", 3) == [0.5, 1], "cut at the front with the token that is never scored"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": [1, 2, 3, 4], "labels": [-100, 2, -100, 4], "advantages": [1, 2, 3]}, [1, 2, 3]),
        ({"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, 4], "advantages": [1, 2, 3, 4]}, [4]),
        ({"input_ids": [1, 2, 3, 4], "num_actions": 3, "loss_mask": [0, 1, 0], "advantages": [1, 2, 3]}, [2, 3]),
        ({"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "advantages": [1, 2, 3, 4]}, [3, 4]),
        ({"input_ids": [1, 2, 3, 4], "num_actions": 4, "advantages": [9, 2, 3, 4]}, [2, 3, 4]),
    ],
)
def test_columns_beside_one_list_of_tokens(load, make_tokenizer, row, expected):
    dataset = needing(load, make_tokenizer(None), [row], "advantages")
    assert read_carried(dataset, "advantages") == expected


def test_one_reward_stands_at_the_last_token_that_is_kept(load, make_tokenizer):
    rows = [{**ROLLOUT, "rewards": 2.5}, {**ROLLOUT, "rewards": [1, 2, 3]}]
    assert read_carried(needing(load, make_tokenizer(None), rows, "rewards"), "rewards", 0) == [0, 0, 2.5]
    cut = needing(load, make_tokenizer(None), rows, "rewards", max_length=4, overlong="truncate")
    assert read_carried(cut, "rewards", 0) == [0, 2.5]
    assert read_carried(cut, "rewards", 1) == [1, 2]
    assert cut.counts.truncated == 2


def test_samplers_log_probabilities_by_either_name(load, make_tokenizer):
    rows = [{**ROLLOUT, "logprobs": [-1, -2, -3]}, {**ROLLOUT, "rollout_logprobs": [-1, -2, -4], "logprobs": [0, 0, 0]}]
    dataset = needing(load, make_tokenizer(None), rows, "rollout_logprobs")
    assert read_carried(dataset, "rollout_logprobs", 0) == [-1, -2, -3]
    assert read_carried(dataset, "rollout_logprobs", 1) == [-1, -2, -4]


def test_text_carries_one_number_per_sample(load, make_tokenizer, chat):
    tokenizer = make_tokenizer()
    dataset = needing(load, tokenizer, [{**chat("a", "b"), "advantages": 0.5}], "advantages")
    assert set(read_carried(dataset, "advantages")) == {0.5}
    with pytest.raises(DataError, match=r"sample 0 \(.*line 1\), column 'advantages': 2 numbers cannot be laid on tokens"):
        needing(load, tokenizer, [{**chat("a", "b"), "advantages": [1, 2]}], "advantages")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "'advantages': it has 2 values for 3 response tokens (5 tokens with the prompt)"),
        ([[1], [2], [3]], "a flat list of numbers is needed"),
        ([[1], [2, 3], [3]], "a number or a flat list of numbers is needed, not list"),
        (["1", "2", "3"], "a flat list of numbers is needed, not a list of <U1"),
        ([True, False, True], "not a list of bool"),
        (True, "a number or a flat list of numbers is needed, not bool"),
        ("0.5", "a number or a flat list of numbers is needed, not str"),
        ([], "it has 0 values for 3 response tokens"),
        ([1, 2, None], "nan stands at token 4, which carries loss"),
        ([1e39, 2, 3], "inf stands at token 2, which carries loss"),
        (float("nan"), "nan stands at token 2, which carries loss"),
        (None, "column 'advantages': it is null, and data.columns names it"),
    ],
)
def test_what_does_not_fit_is_named(load, make_tokenizer, value, message):
    with pytest.raises(DataError, match=r"^sample 1 \(.*rows.jsonl line 2\)") as caught:
        needing(load, make_tokenizer(None), [{**ROLLOUT, "advantages": 1}, {**ROLLOUT, "advantages": value}], "advantages")
    assert message in caught.value.cause


def test_a_missing_column_says_who_needs_it_and_what_is_near(tmp_path, make_tokenizer):
    def load(row):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        data = DataConfig(train=str(tmp_path / "rows.jsonl"), cache=str(tmp_path / "cache"))
        return load_columns(data, make_tokenizer(None), split="train", needed=ADVANTAGES)

    with pytest.raises(
        DataError, match=r"line 1\) has no column 'advantages', which loss mine needs; it has 'prompt_ids'"
    ) as caught:
        load(ROLLOUT)
    assert caught.value.remedy == "Add advantages to every sample: one number per response token, or one for all of them"
    with pytest.raises(DataError) as caught:
        load({**ROLLOUT, "advantage": 1.0})
    assert caught.value.remedy == "Did you mean 'advantages' instead of 'advantage'? Rename it"
    with pytest.raises(DataError, match=r"line 1\), column 'advantages': it is null, and loss mine needs it"):
        load({**ROLLOUT, "advantages": None})


@pytest.mark.parametrize(("name", "score"), [("logprob", "logprobs"), ("value", "values"), ("entropys", "entropy")])
def test_a_misspelt_score_of_the_model_is_answered_with_the_right_one(tmp_path, make_tokenizer, name, score):
    """The data must not be asked for log-probabilities that the model computes."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROLLOUT) + "\n")
    data = DataConfig(train=str(tmp_path / "rows.jsonl"), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=f"^loss mine needs '{name}', which is neither a score of the model") as caught:
        load_columns(data, make_tokenizer(None), split="train", needed={name: "loss mine needs"})
    assert caught.value.remedy == f"Did you mean {score!r}? Correct its needs"


def test_no_known_column_is_taken_for_another_one_misspelled(load, make_tokenizer):
    """The sampler's log-probabilities, renamed, would pass for the reference model's."""
    with pytest.raises(DataError, match="has no column 'ref_logprobs'") as caught:
        needing(load, make_tokenizer(None), [{**ROLLOUT, "logprobs": [-1.0] * 3, "old_logprobs": [-1.0] * 3}], "ref_logprobs")
    assert caught.value.remedy.startswith("Add ref_logprobs to every sample")


@pytest.mark.parametrize("name", ["input_ids", "loss_weight", "group_ids", "row", "images"])
def test_names_that_have_a_meaning_cannot_be_columns(load, make_tokenizer, name):
    with pytest.raises(DataError, match=f"data.columns names a column called '{name}'"):
        needing(load, make_tokenizer(None), [ROLLOUT], name)


def test_ids_of_the_rows_are_kept_and_texts_numbered(load, make_tokenizer):
    rows = [{**ROLLOUT, "sample_ids": 70 + i, "group_ids": ["b", "a", "b"][i], "unit_ids": [4, -4, 4][i]} for i in range(3)]
    columns = load(rows, make_tokenizer(None)).columns
    assert columns.sample_ids.tolist() == [70, 71, 72]
    assert columns.group_ids.tolist() == [0, 1, 0]
    assert columns.unit_ids.tolist() == [4, -4, 4]
    assert columns.grouped
    assert not load([ROLLOUT], make_tokenizer(None)).columns.grouped


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"group_ids": 1}, {}, "'group_ids': an integer or a text is needed, not nothing"),
        ({"group_ids": 1}, {"group_ids": "x"}, "'x' is text, the ids before it are not"),
        ({"group_ids": 1}, {"group_ids": 1.5}, "an integer or a text is needed, not float"),
        ({"group_ids": 1}, {"group_ids": True}, "an integer or a text is needed, not bool"),
        ({"unit_ids": 1}, {"unit_ids": 2**63}, "needs more than 64 bits"),
        ({"sample_ids": 1}, {"sample_ids": 1}, "the id 1 is that of"),
        ({"sample_ids": 1}, {"sample_ids": -1}, "the id -1 is negative"),
    ],
)
def test_ids_that_do_not_fit_are_named(load, make_tokenizer, first, second, message):
    with pytest.raises(DataError, match=r"^sample 1 \(.*rows.jsonl line 2\), column") as caught:
        load([{**ROLLOUT, **first}, {**ROLLOUT, **second}], make_tokenizer(None))
    assert message in caught.value.cause


def test_sample_ids_are_numbers(load, make_tokenizer):
    with pytest.raises(DataError, match=r"'sample_ids': 'first' is no integer"):
        load([{**ROLLOUT, "sample_ids": "first"}], make_tokenizer(None))


def test_groups_stay_on_one_side_of_the_held_out_part(load, make_tokenizer):
    """Also those that are joined by a unit only; the share is reached in whole groups."""
    rows = [{**ROLLOUT, "group_ids": i // 4 if i < 28 else i, "unit_ids": 3 if i in (0, 39) else 100 + i} for i in range(40)]
    tokenizer = make_tokenizer(None)
    for seed in range(5):
        parts = [load(rows, tokenizer, split=split, seed=seed, eval_fraction=0.25) for split in ("train", "eval")]
        train, held_out = (set(part.columns.sample_values["row"].tolist()) for part in parts)
        assert train | held_out == set(range(40))
        assert not train & held_out
        assert 10 <= len(held_out) <= 14
        assert {number // 4 for number in train if number < 28}.isdisjoint({number // 4 for number in held_out if number < 28})
        assert (0 in train) == (39 in train)
    with pytest.raises(DataError, match=r"all samples of .* belong together"):
        load([{**ROLLOUT, "group_ids": 1}] * 3, tokenizer, eval_fraction=0.5)


def test_the_cache_knows_the_columns(load, make_tokenizer):
    tokenizer = make_tokenizer(None)
    rows = [{**ROLLOUT, "advantages": 1.5, "returns": [1, 2, 3], "group_ids": "g"}]
    first = needing(load, tokenizer, rows, "advantages")
    assert not first.counts.from_cache
    again = needing(load, tokenizer, rows, "advantages")
    assert again.counts.from_cache
    assert again.columns.columns["advantages"].tolist() == first.columns.columns["advantages"].tolist()
    assert not again.columns.columns["advantages"].flags.owndata
    assert again.columns.group_ids.tolist() == [0]
    both = needing(load, tokenizer, rows, "returns", "advantages")
    assert not both.counts.from_cache
    assert set(both.columns.columns) == {"advantages", "returns"}
    assert needing(load, tokenizer, rows, "advantages", "returns").counts.from_cache, "in any order"


def test_a_damaged_column_is_read_again(load, make_tokenizer):
    rows = [{**ROLLOUT, "advantages": [1.25, 2.5, 3.75]}]
    tokenizer = make_tokenizer(None)
    path = needing(load, tokenizer, rows, "advantages").cache_file
    content = path.read_bytes()
    value = np.float32(3.75).tobytes()
    assert content.count(value) == 1
    path.write_bytes(content.replace(value, np.float32(7.75).tobytes()))
    again = needing(load, tokenizer, rows, "advantages")
    assert not again.counts.from_cache
    assert read_carried(again, "advantages") == [1.25, 2.5, 3.75]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved"])
def test_arrow_data_gives_what_json_lines_give(load, tmp_path, make_tokenizer, kind):
    rows = [
        {**ROLLOUT, "advantages": [0.5, 1.5, -2.0], "returns": 0.25, "logprobs": [None, -1.0, -1.0, None, -2.0], "group_ids": "x"},
        {**ROLLOUT, "advantages": [1.0, 1.0, 1.0], "returns": 4.0, "logprobs": [None, None, -3.0, -1.0, -2.0], "group_ids": "y"},
    ]
    table = pa.Table.from_pylist(rows)
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        import datasets

        datasets.disable_progress_bar()
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    names = ("advantages", "returns", "rollout_logprobs")
    tokenizer = make_tokenizer(None)
    reference = needing(load, tokenizer, rows, *names).columns
    data = DataConfig(train=str(path), cache=str(tmp_path / "cache"), columns=names)
    columns = load_columns(data, tokenizer, split="train").columns
    for name in names:
        np.testing.assert_array_equal(columns.columns[name], reference.columns[name])
    assert columns.group_ids.tolist() == reference.group_ids.tolist() == [0, 1]
    assert columns.loss_weight.tolist() == reference.loss_weight.tolist()


@settings(deadline=None)
@given(st.data())
def test_a_number_meets_the_token_it_was_written_for(draw):
    """Whatever the response, the mask, the cut and the list's kind: value t of the tokens ends at token t."""
    tokens = draw.draw(st.integers(2, 12))
    response = draw.draw(st.integers(1, tokens))
    loss = np.array([False] + [draw.draw(st.booleans()) if i >= tokens - response else False for i in range(1, tokens)])
    stop = draw.draw(st.integers(2, tokens))
    if not loss[:stop].any():
        return
    every = [float(number) for number in range(tokens)]
    given_values = every if draw.draw(st.booleans()) else every[tokens - response :]
    ids = np.arange(tokens, dtype=np.int32)
    whole = TokenizedSample(0, "s", ids, loss, response=response)
    cut = TokenizedSample(0, "s", ids[:stop], loss[:stop], response=response)
    values = ColumnReader(ADVANTAGES)(Row(0, "here", {"advantages": given_values}), whole, cut)["advantages"]
    first = int(np.argmax(loss))
    assert values.shape == (stop - first,)
    carrying = loss[first:stop]
    assert values[carrying].tolist() == ids[first:stop][carrying].tolist()
