"""Rows that cannot be used: all of them are named at once, or left out and counted."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import TokenizedDataset, load_columns
from skyrl_engine.data.images.processor import NoVision
from skyrl_engine.data.streaming.stream import StreamedData
from skyrl_engine.errors import DataError

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
BAD: dict[str, Any] = {
    "no role": {"messages": [{"content": "one"}, {"role": "assistant", "content": "two"}]},
    "no column": {"text_of_it": "one"},
    "half a character": {"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "two"}]},
    "no JSON": '{"messages": [',
    "no object": "[1, 2]",
}
"""Bad rows, each found at another place: while parsing, recognising, reading and tokenizing."""

Load = Callable[..., TokenizedDataset]


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def load(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> Load:
    def load_rows(*rows: Any, reading: Any = "samples", **settings: Any) -> TokenizedDataset:
        data = DataConfig(train=write(tmp_path / "rows.jsonl", *rows), cache=str(tmp_path / "cache"), **settings)
        return load_columns(data, make_tokenizer("chatml"), split="train", vision=NoVision(), reading=reading)

    return load_rows


def test_all_are_named_at_once(load: Load) -> None:
    with pytest.raises(DataError, match=r"6 of 8 rows of .*rows\.jsonl cannot be used") as caught:
        load(BAD["no object"], GOOD, *BAD.values(), GOOD)
    assert [number for line in caught.value.details for number in range(1, 9) if f"rows.jsonl line {number}" in line] == [
        1,
        3,
        4,
        5,
        6,
        7,
    ]


@pytest.mark.parametrize("wrong", BAD)
def test_one_is_refused_by_its_own_error(load: Load, wrong: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl line 2") as caught:
        load(GOOD, BAD[wrong], GOOD)
    assert not caught.value.details


def test_many_are_counted(load: Load) -> None:
    with pytest.raises(DataError, match=r"40 of 340 rows") as caught:
        load(*[GOOD] * 300, *[BAD["no role"]] * 40)
    assert len(caught.value.details) == 11
    assert caught.value.details[-1] == "and 30 more"
    assert 'data.bad_rows = "drop"' in caught.value.remedy
    with pytest.raises(DataError, match=r"1,000 of 1,300 rows"):
        load(*[GOOD] * 300, *[BAD["no role"]] * 4000)


def test_what_no_row_has_is_no_matter_of_single_rows(load: Load) -> None:
    for policy in ("error", "drop"):
        with pytest.raises(DataError, match=r"rows\.jsonl line 1\b"):
            load(*[BAD["no role"]] * 3, bad_rows=policy)


@pytest.mark.parametrize("wrong", BAD)
@pytest.mark.parametrize("place", [0, 1])
def test_they_are_left_out_and_counted(load: Load, caplog: pytest.LogCaptureFixture, wrong: str, place: int) -> None:
    rows = [GOOD, GOOD]
    rows.insert(place, BAD[wrong])
    for cached in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            dataset = load(*rows, bad_rows="drop")
        counts = dataset.counts
        assert (counts.rows, counts.samples, counts.dropped_bad_rows, counts.dropped, counts.from_cache) == (3, 2, 1, 1, cached)
        assert "1 of 3 rows of" in caplog.text
        assert f"rows.jsonl line {place + 1}" in caplog.text
        assert dataset.columns.sample_values["row"].tolist() == [row for row in range(3) if row != place]


def test_what_is_left_has_the_tokens_that_it_has_alone(load: Load) -> None:
    alone = load(GOOD, GOOD).columns
    among = load(GOOD, *BAD.values(), GOOD, bad_rows="drop").columns
    assert among.input_ids.tolist() == alone.input_ids.tolist()
    assert among.loss_weight.tolist() == alone.loss_weight.tolist()


def test_other_keys_say_what_becomes_of_long_samples(load: Load) -> None:
    long = {"messages": [{"role": "user", "content": "one " * 50}, {"role": "assistant", "content": "two"}]}
    with pytest.raises(DataError, match=r"more than data\.max_length = 40"):
        load(GOOD, long, BAD["no role"], bad_rows="drop", max_length=40)
    counts = load(GOOD, long, BAD["no role"], bad_rows="drop", max_length=40, overlong="drop").counts
    assert (counts.samples, counts.dropped_overlong, counts.dropped_bad_rows) == (1, 1, 1)


def test_pairs_are_left_out_whole(load: Load) -> None:
    pairs = [
        {"prompt": "one", "chosen": "two", "rejected": "three"},
        {"prompt": "one", "chosen": "two", "rejected": "two"},
        {"prompt": "one", "chosen": "two", "rejected": "\ud83d"},
        {"prompt": "one", "chosen": "two"},
        {"prompt": "two", "chosen": "one", "rejected": "three"},
    ]
    dataset = load(*pairs, bad_rows="drop", reading="preferences")
    assert dataset.columns.sample_values["row"].tolist() == [0, 0, 4, 4]
    assert (dataset.counts.samples, dataset.counts.dropped_bad_rows) == (4, 3)


def test_a_unit_goes_with_its_bad_row(load: Load) -> None:
    rows = [{**GOOD, "unit_ids": unit} for unit in (1, 1, 2)]
    rows[0] = {**BAD["half a character"], "unit_ids": 1}
    dataset = load(*rows[1:], rows[0], bad_rows="drop")
    assert dataset.columns.sample_values["row"].tolist() == [1]
    assert (dataset.counts.dropped_bad_rows, dataset.counts.dropped_with_unit) == (1, 1)


def test_a_stream_leaves_them_out_too(tmp_path: Path, make_tokenizer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    place = write(tmp_path / "rows.jsonl", *BAD.values(), *[GOOD] * 3)
    settings: dict[str, Any] = {"batch_size": 4, "seed": 1, "shuffle": False, "needed": {}}
    dropping = StreamedData.of(DataConfig(train=place, streaming=True, bad_rows="drop"), make_tokenizer("chatml"), **settings)
    with caplog.at_level(logging.WARNING):
        first, after = dropping.mini_batch(dropping.start())
        second, last = dropping.mini_batch(after)
    assert (len(first), first.counts.dropped_bad_rows, first.counts.rows) == (4, 10, 14)
    assert (after.rows, after.samples, after.dropped) == (14, 4, 10)
    assert len(second) == 4
    assert last.samples == 8
    assert caplog.text.count("are left out") == 1
    again = dropping.mini_batch(type(after).of(after.document()))[0]
    assert again.columns.input_ids.tolist() == second.columns.input_ids.tolist()
    refusing = StreamedData.of(DataConfig(train=place, streaming=True), make_tokenizer("chatml"), **settings)
    with pytest.raises(DataError, match=r"rows\.jsonl line 1\b"):
        refusing.mini_batch(refusing.start())
    none = write(tmp_path / "none.jsonl", *list(BAD.values()) * 2)
    empty = StreamedData.of(DataConfig(train=none, streaming=True, bad_rows="drop"), make_tokenizer("chatml"), **settings)
    with pytest.raises(DataError) as caught:
        empty.mini_batch(empty.start())
    assert "none.jsonl line 1" in str(caught.value)
