"""Rows of object stores: every format gives the rows of a local file, streams go on where they were, and failures are said."""

import json

import datasets
import fsspec
import pytest
from failing_store import StoreOfTest
from row_files import ROWS, WRITERS

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import load_columns
from skyrl_engine.data.sources.files import ShardCursor
from skyrl_engine.data.sources.locate import open_source
from skyrl_engine.data.streaming.row_stream import RowStream, StreamPlace
from skyrl_engine.errors import DataError, StoreError
from skyrl_engine.object_store import place as places
from skyrl_engine.object_store import remote_file

FILES = [name for name in WRITERS if not name.startswith("saved")]


@pytest.fixture(autouse=True)
def store(monkeypatch) -> fsspec.AbstractFileSystem:
    """The store, empty; its files are read in blocks of 64 bytes, and nobody waits."""
    StoreOfTest.begin()
    monkeypatch.setattr(remote_file, "BLOCK", 64)
    monkeypatch.setattr(places.time, "sleep", lambda _: None)
    return fsspec.filesystem("failing")


@pytest.mark.parametrize("name", FILES)
def test_rows_and_digest_are_those_of_the_local_file(tmp_path, store, name) -> None:
    WRITERS[name](tmp_path / name)
    store.pipe_file(f"/bucket/{name}", (tmp_path / name).read_bytes())
    local, remote = (open_source(f"{place}/{name}", split="train") for place in (tmp_path, "failing://bucket"))
    assert [row.values for row in remote.rows()] == [row.values for row in local.rows()] != []
    assert [row.where.replace("failing://bucket", str(tmp_path)) for row in remote.rows()] == [row.where for row in local.rows()]
    assert remote.digest == local.digest
    assert len(remote) == len(ROWS)
    if not name.endswith(".gz"):
        assert remote.row(3).values == local.row(3).values
    part = remote.parts[0]
    assert (part.folder, part.size) == (None, (tmp_path / name).stat().st_size)
    for number, (_, after, _, _) in enumerate(part.read_from(ShardCursor())):
        assert len(list(part.read_from(after))) == len(ROWS) - number - 1


def test_files_of_folders_patterns_and_splits(store) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl", "README.md", "_x/a.jsonl", "small/train.jsonl"):
        store.pipe_file(f"/bucket/rows/{name}", json.dumps({"text": name}).encode())

    def texts(location: str, **options: str) -> list[str]:
        return [row.values["text"] for row in open_source(location, **{"split": "train", **options}).rows()]

    assert texts("failing://bucket/rows") == ["small/train.jsonl", "train-0.jsonl", "train-1.jsonl"]
    assert texts("failing://bucket/rows/", split="test") == ["test-0.jsonl"]
    assert texts("failing://bucket/rows", subset="small") == ["small/train.jsonl"]
    assert texts("failing://bucket/rows/t*.jsonl") == ["test-0.jsonl", "train-0.jsonl", "train-1.jsonl"]


def test_columns_are_those_of_the_local_file(tmp_path, store, make_tokenizer) -> None:
    WRITERS["rows.jsonl"](tmp_path / "rows.jsonl")
    store.pipe_file("/bucket/rows.jsonl", (tmp_path / "rows.jsonl").read_bytes())
    tokenizer = make_tokenizer(None)
    settings = {"map": {"text": "note"}, "format": "text", "bad_rows": "drop"}
    read = [
        load_columns(DataConfig(train=place, cache=str(tmp_path / f"cache-{number}"), **settings), tokenizer, split="train")
        for number, place in enumerate([str(tmp_path / "rows.jsonl"), "failing://bucket/rows.jsonl"])
    ]
    assert read[0].columns.input_ids.tobytes() == read[1].columns.input_ids.tobytes() != b""


def test_a_stream_goes_on_from_its_place_while_the_store_fails(store) -> None:
    for number in range(3):
        rows = "".join(json.dumps({"text": f"{number} {row}"}) + "\n" for row in range(40))
        store.pipe_file(f"/bucket/{number}.jsonl", rows.encode())

    def open_at(place: StreamPlace):
        shards = open_source("failing://bucket/*.jsonl", split="train", streaming=True).parts
        return RowStream("rows", shards, (3,), 7, shuffle=True).open(place)

    whole = open_at(StreamPlace())
    expected = [whole.draw().content for _ in range(200)]
    assert sorted(expected[:120]) == sorted({*expected})

    def fail(number: int, name: str) -> None:
        if number % 3:
            raise ConnectionResetError("reset by peer")

    StoreOfTest.expect(fail)
    opened, drawn = open_at(StreamPlace()), []
    for count in (1, 50, 69, 80):
        drawn += [opened.draw().content for _ in range(count)]
        opened = open_at(StreamPlace.of(json.loads(json.dumps(opened.place.document()))))
    assert drawn == expected


def test_a_store_that_gives_too_little_or_lost_the_file_is_named(store) -> None:
    store.pipe_file("/bucket/rows.jsonl", b'{"text": "x"}\n' * 20)
    source = open_source("failing://bucket/rows.jsonl", split="train", streaming=True)
    rows = source.rows()
    next(rows)
    store.pipe_file("/bucket/rows.jsonl", b'{"text": "x"}\n' * 5)
    with pytest.raises(StoreError, match=r"cannot read failing://bucket/rows.jsonl after 4 tries: OSError: it gave 6 bytes"):
        list(rows)
    rows = open_source("failing://bucket/rows.jsonl", split="train", streaming=True).rows()
    next(rows)
    store.rm_file("/bucket/rows.jsonl")
    with pytest.raises(StoreError, match="was deleted while it was read"):
        list(rows)


def test_what_is_not_there_or_cannot_be_read_is_refused(store) -> None:
    def refused(location: str, message: str, **options: str) -> None:
        with pytest.raises(DataError, match=message):
            open_source(location, **{"split": "train", **options})

    refused("failing://bucket/rows.jsonl", "there is nothing at failing://bucket/rows.jsonl")
    refused("failing://bucket/*.jsonl", "no data file is named like")
    refused("x=failing://bucket", "does not begin with its protocol")
    store.pipe_file("/bucket/rows.jsonl", b"[]")
    refused("failing://bucket/rows.jsonl", "has no subsets", subset="a")
    refused("failing://bucket/*.jsonl", "names files", subset="a")
    store.pipe_file("/array/rows.json", b"[]")
    store.pipe_file("/text/README.md", b"x")
    refused("failing://text", "holds no data file")
    refused("failing://text/README.md", "is not in a format that can be read")
    store.pipe_file("/saved/state.json", b"{}")
    refused("failing://saved", "save_to_disk wrote")
    with pytest.raises(DataError, match=r"data.streaming = false"):
        open_source("failing://array/rows.json", split="train", streaming=True)


@pytest.fixture(autouse=True)
def quiet_datasets() -> None:
    datasets.disable_progress_bars()
