"""load_columns: splits, lengths, counts, and columns that view the cache file's memory."""

import json
import logging

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import load_columns
from skyrl_engine.errors import DataError

TEXTS = [{"text": f"sample {i} " + "word " * (i % 7)} for i in range(40)]


def rows_of(dataset):
    return set(dataset.columns.sample_values["row"].tolist())


def test_counts_add_up(load, make_tokenizer):
    dataset = load(TEXTS, make_tokenizer(None))
    counts, columns = dataset.counts, dataset.columns
    assert (counts.rows, counts.samples, counts.dropped, counts.truncated) == (40, 40, 0, 0)
    assert counts.tokens == len(columns.input_ids) == columns.token_offsets[-1]
    assert counts.loss_tokens == int(columns.loss_weight.sum()) == counts.tokens - 40
    assert dataset.format == "text"


def test_columns_view_the_cache_file_without_a_copy(load, make_tokenizer):
    columns = load(TEXTS, make_tokenizer(None)).columns
    for array in (columns.input_ids, columns.loss_weight, columns.sample_values["row"]):
        assert not array.flags.owndata
        assert not array.flags.writeable
    assert (columns.input_ids.dtype, columns.loss_weight.dtype) == (np.int32, np.uint8)


def test_the_held_out_part_is_disjoint_repeatable_and_seeded(load, make_tokenizer):
    tokenizer = make_tokenizer(None)
    train, held_out = (load(TEXTS, tokenizer, split=split, seed=3, eval_fraction=0.25) for split in ("train", "eval"))
    assert len(held_out) == 10
    assert rows_of(train) | rows_of(held_out) == set(range(40))
    assert not rows_of(train) & rows_of(held_out)
    assert rows_of(load(TEXTS, tokenizer, split="eval", seed=3, eval_fraction=0.25)) == rows_of(held_out)
    assert rows_of(load(TEXTS, tokenizer, split="eval", seed=4, eval_fraction=0.25)) != rows_of(held_out)


def test_max_samples_keeps_the_first_rows_before_the_split(load, make_tokenizer):
    tokenizer = make_tokenizer(None)
    assert rows_of(load(TEXTS, tokenizer, max_samples=5)) == set(range(5))
    parts = [rows_of(load(TEXTS, tokenizer, split=split, max_samples=8, eval_fraction=0.5)) for split in ("train", "eval")]
    assert [len(part) for part in parts] == [4, 4]
    assert set.union(*parts) == set(range(8))


def test_rows_beyond_max_samples_are_not_read(tmp_path, make_tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nnot json\n', encoding="utf-8")
    data = DataConfig(train=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"), max_samples=1)
    assert len(load_columns(data, make_tokenizer(None), split="train")) == 1


def test_evaluation_data_of_its_own(tmp_path, make_tokenizer):
    for name, count in (("train", 3), ("eval", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS[:count]), encoding="utf-8")
    data = DataConfig(
        train=str(tmp_path / "train.jsonl"), eval=str(tmp_path / "eval.jsonl"), eval_fraction=0.5, cache=str(tmp_path / "cache")
    )
    assert [len(load_columns(data, make_tokenizer(None), split=split)) for split in ("train", "eval")] == [3, 2]
    (tmp_path / "data" / "small").mkdir(parents=True)
    (tmp_path / "train.jsonl").rename(tmp_path / "data" / "small" / "train.jsonl")
    with_subset = evolve(data, train=str(tmp_path / "data"), subset="small")
    assert [len(load_columns(with_subset, make_tokenizer(None), split=split)) for split in ("train", "eval")] == [3, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "eval"}, "neither data.eval nor data.eval_fraction is set"),
        ({"split": "eval", "eval_fraction": 0.5, "max_samples": 1}, "leaves nothing to train on"),
    ],
)
def test_splits_that_cannot_be_made(load, make_tokenizer, settings, message):
    with pytest.raises(DataError, match=message):
        load(TEXTS, make_tokenizer(None), **settings)


def test_over_long_samples(load, make_tokenizer, chat, marked):
    tokenizer = make_tokenizer()
    short, long = chat("hi", "yo"), chat("hi", "a very long answer with many characters in it")
    prompt_too_long = chat("a very long question with many characters in it", "yo")
    rows = [short, long, prompt_too_long]
    limit = 40
    with pytest.raises(DataError, match=r"sample 1 \(.*line 2\) has \d+ tokens, more than data.max_length = 40"):
        load(rows, tokenizer, max_length=limit)
    dropped = load(rows, tokenizer, max_length=limit, overlong="drop")
    assert rows_of(dropped) == {0}
    assert (dropped.counts.dropped_overlong, dropped.counts.truncated, dropped.counts.rows) == (2, 0, 3)
    cut = load(rows, tokenizer, max_length=limit, overlong="truncate")
    assert rows_of(cut) == {0, 1}
    assert (cut.counts.dropped_overlong, cut.counts.truncated, cut.counts.samples) == (1, 1, 2)
    assert np.diff(cut.columns.token_offsets).max() == limit
    assert marked(cut, tokenizer, 1).startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[a very")


def test_samples_without_loss_are_dropped_and_counted(load, make_tokenizer):
    rows = [
        {"input_ids": [1, 2], "labels": [-100, -100]},
        {"input_ids": [1], "labels": [1]},
        {"input_ids": [1, 2], "labels": [1, 2]},
    ]
    dataset = load(rows, make_tokenizer(None))
    assert rows_of(dataset) == {2}
    assert dataset.counts.dropped_without_loss == 2
    with pytest.raises(DataError, match="of 2 rows 0 were over-long and 2 had no token that carries loss"):
        load(rows[:2], make_tokenizer(None))


def test_progress_counts_rows(tmp_path, make_tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(TEXTS[i % 40]) + "\n" for i in range(600)), encoding="utf-8")
    calls = []
    data = DataConfig(train=str(path), cache=str(tmp_path / "cache"))
    load_columns(data, make_tokenizer(None), split="train", progress=lambda *call: calls.append(call))
    assert calls == [("tokenizing training data", done, 600) for done in (256, 512, 600)]


def test_texts_without_an_end_are_counted_and_told_once(load, make_tokenizer, chat, caplog):
    """Nothing would teach the model to stop; a template's own token ends a turn as well."""
    rows, chats = [{"prompt": "q ", "completion": "ab"}, {"prompt": "q ", "completion": "ab<|eot|>"}], [chat("q", "a")]
    ready = [{"input_ids": [50, 51], "labels": [-100, 51]}]

    def count_unended(rows, template):
        tokenizer = make_tokenizer(template)
        tokenizer.eos_token = None
        return load(rows, tokenizer).counts.unended

    with caplog.at_level(logging.WARNING, "skyrl_engine"):
        assert [load(rows, make_tokenizer()).counts.unended, count_unended(chats, "headers"), count_unended(ready, None)] == [
            0,
            0,
            0,
        ]
        assert caplog.records == []
        assert count_unended(rows, None) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the tokenizer has no end-of-text token (eos_token), and 1 of 2 samples of ")
    assert count_unended(chats, "unmarked") == 1


def test_answers_without_a_token_before_them_are_counted_and_told_once(load, make_tokenizer, marked, caplog):
    """Nothing predicts the first token of such an answer; a text that is no answer begins so by its nature."""
    rows = [{"prompt": "", "completion": "ab"}, {"prompt": "q ", "completion": "ab"}, {"prompt": "", "completion": "b"}]
    tokenizer = make_tokenizer()
    with caplog.at_level(logging.WARNING, "skyrl_engine"):
        bare = load(rows, tokenizer, template="none")
        messages = [record.getMessage() for record in caplog.records]
        counted = [load(rows, make_tokenizer(None, adds_bos=True)).counts, load([{"text": "ab"}], tokenizer).counts]
    assert bare.counts.unprompted == 2
    assert marked(bare, tokenizer) == "a[[b<|end|>]]"
    (told_once,) = messages
    assert told_once.startswith(
        f"2 of 3 samples of {bare.name} have an empty prompt, and the tokenizer puts no token before a text"
    )
    assert [counts.unprompted for counts in counted] == [0, 0]
    assert len(caplog.records) == 1
