"""Streams of rows: bounded memory over any amount of data, hub datasets shard by shard, and rows that are not there any more."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import frozen

from skyrl_engine.data.sources.files import DatasetPart, JsonLines, ParquetFile, Scan, ShardCursor, ShardRow
from skyrl_engine.data.sources.hub_shard import HubShard
from skyrl_engine.data.streaming.row_stream import DrawnRow, OpenStream, RowStream, StreamPlace
from skyrl_engine.errors import DataError

ROWS, BYTES, BUFFER = 100_000, 1000, 2_000


@frozen
class GeneratedShard(DatasetPart):
    """100 MB of rows that are made when they are read."""

    number: int

    @property
    def folder(self) -> None:
        return None

    @property
    def size(self) -> int:
        return ROWS * BYTES

    def scan(self) -> Scan:
        raise AssertionError("a stream is not read whole")

    def read(self) -> Iterator[tuple[str, bytes]]:
        raise AssertionError("a stream is read from a place on")

    def at(self, index: int) -> tuple[str, bytes]:
        raise AssertionError("rows of a stream are read in their order")

    def read_from(self, cursor: ShardCursor) -> Iterator[ShardRow]:
        for row in range(cursor.row, ROWS):
            content = f"{self.number} {row} ".encode().ljust(BYTES, b".")
            yield ShardCursor(row), ShardCursor(row + 1), f"shard {self.number} row {row}", content


def names(opened: OpenStream, count: int) -> list[str]:
    return [opened.draw().where for _ in range(count)]


def test_fifty_gigabytes_take_the_memory_of_the_buffer_and_go_on_from_any_place() -> None:
    """2,000 rows of 1,000 bytes wait; Python's own share of a row is below 600 bytes. The end is reached from a place deep in the data."""
    stream = RowStream("generated", [GeneratedShard(number) for number in range(500)], (3,), BUFFER, shuffle=True)
    assert sum(shard.size or 0 for shard in stream.shards) == 50e9
    tracemalloc.start()
    try:
        opened = stream.open(StreamPlace())
        drawn = [opened.draw().shard for _ in range(20 * BUFFER)]
        assert tracemalloc.get_traced_memory()[1] < BUFFER * (BYTES + 600) + 2e6
    finally:
        tracemalloc.stop()
    assert len(set(drawn)) == 1, "the shards of an epoch come one after the other"
    deep = StreamPlace(epoch=0, drawn=49_999_990 - BUFFER, dealt=499, cursor=ShardCursor(ROWS - 10), buffer=opened.place.buffer)
    last = stream.open(deep)
    rows = [last.draw() for _ in range(BUFFER + 10)]
    assert sum(row.shard == stream.deal(0)[499] for row in rows) == 10
    assert last.place.buffer.size == 0
    after = StreamPlace.of(json.loads(json.dumps(last.place.document())))
    assert names(stream.open(after), 5) == names(last, 5), "the next epoch begins"
    assert stream.deal(1) != stream.deal(0)


def test_rows_of_parquet_wait_without_the_batches_they_were_read_with(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [np.arange(8)] * 5000}), tmp_path / "a.parquet")
    opened = RowStream("a", [ParquetFile(tmp_path / "a.parquet")], (3,), 16, shuffle=True).open(StreamPlace())
    rows: list[DrawnRow] = [opened.draw() for _ in range(3000)]
    contents = [row.content for row in (*rows, *opened.waiting_rows)]
    assert all(content["input_ids"].base is None for content in contents if not isinstance(content, bytes))


def test_hub_datasets_stream_by_shard(tmp_path: Path) -> None:
    """`datasets` streams local files as it does those of the hub."""
    for shard in range(3):
        (tmp_path / f"{shard}.jsonl").write_text("".join(json.dumps({"text": f"{shard} {row}"}) + "\n" for row in range(9)))
    files = sorted(map(str, tmp_path.glob("*.jsonl")))
    loaded = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    shards = [
        HubShard(f"hub {number}", loaded.shard(num_shards=3, index=number), str(number)) for number in range(loaded.num_shards)
    ]
    stream = RowStream("hub", shards, (3,), 5, shuffle=True)
    opened = stream.open(StreamPlace())
    places = [opened.place]
    texts = []
    for _ in range(27):
        texts.append(opened.draw().content["text"])  # type: ignore[index]
        places.append(opened.place)
    assert sorted(texts) == sorted(f"{shard} {row}" for shard in range(3) for row in range(9))
    for start in (0, 4, 13, 24):
        again = stream.open(places[start])
        assert [again.draw().content["text"] for _ in range(3)] == texts[start : start + 3]  # type: ignore[index]


def test_a_row_of_the_buffer_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 9)
    stream = RowStream("a", [JsonLines(tmp_path / "a.jsonl")], (3,), 4, shuffle=True)
    opened = stream.open(StreamPlace())
    for _ in range(5):
        opened.draw()
    (tmp_path / "a.jsonl").write_text("{}\n" * 2)
    with pytest.raises(DataError, match=r"a\.jsonl 6 has no row \d any more"):
        stream.open(opened.place)
