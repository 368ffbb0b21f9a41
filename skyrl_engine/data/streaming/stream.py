"""Mini-batches of samples from streams of rows: rows are drawn, tokenized, and forgotten."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from attrs import define, evolve, field, frozen

from skyrl_engine.config.schema import DataConfig, KnownFormat
from skyrl_engine.data.dataset import DataCounts, TokenizedDataset, label_samples, warn_of_bad_rows, warn_of_rows
from skyrl_engine.data.images.processor import NoVision
from skyrl_engine.data.sources.formats import FORMATS, Reading, detect
from skyrl_engine.data.sources.locate import open_source
from skyrl_engine.data.sources.rows import BoolArray, Row, Source
from skyrl_engine.data.streaming.row_stream import DrawnRow, OpenStream, RowStream, StreamPlace, count_bytes
from skyrl_engine.data.table import arrow_arrays
from skyrl_engine.data.table.bad_rows import MOST_NAMED, BadRows
from skyrl_engine.data.table.cache import tokenizer_identity
from skyrl_engine.data.table.filling import TableFilling
from skyrl_engine.data.table.sample_columns import ID_COLUMNS, ColumnReader
from skyrl_engine.data.table.token_table import TokenTable, TokenTableWriter
from skyrl_engine.data.text.template_rule import Rendering
from skyrl_engine.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MIX = 0x6D697872  # keeps this use of the run's seed apart from its other uses

_NO_IMAGES: Final = NoVision("images are not read out of a stream", "Set data.streaming = false")


@frozen(eq=False)
class StreamPosition:
    """A place between two mini-batches of a stream: `rows` were drawn in all, of which `samples` were kept and `dropped` left out."""

    rows: int
    samples: int
    dropped: int
    passes: float
    places: tuple[StreamPlace, ...]

    @property
    def epoch(self) -> int:
        """Return the number of whole passes over every dataset that is drawn from."""
        return int(self.passes)

    def document(self) -> dict[str, Any]:
        """Return the position as plain values."""
        counted = {"rows": self.rows, "samples": self.samples, "dropped": self.dropped, "passes": self.passes}
        return {**counted, "places": [place.document() for place in self.places]}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Read what `document` returned."""
        counted = {name: document[name] for name in ("rows", "samples", "dropped", "passes")}
        return cls(**counted, places=tuple(StreamPlace.of(place) for place in document["places"]))


@frozen(eq=False)
class StreamedRows(Source):
    """Rows that were drawn for a mini-batch, numbered from 0, as a source."""

    drawn: Sequence[Row] = ()

    def __len__(self) -> int:
        return len(self.drawn)

    def rows(self, wanted: BoolArray | None = None, on_bad: Callable[[int, DataError], None] | None = None) -> Iterator[Row]:
        del on_bad  # they are parsed
        return (row for row, chosen in zip(self.drawn, wanted, strict=True) if chosen) if wanted is not None else iter(self.drawn)


@define(eq=False)
class StreamedData:
    """The training data of a configuration with `data.streaming`, in mini-batches of `batch_size` samples.

    `source` is opened and not read. With `data.weights` every dataset is a stream, and each row is drawn from one of them by its weight;
    without, one stream has the shards of all. The order depends on nothing but `seed`, the shards and the settings.
    """

    data: DataConfig
    source: Source
    tokenizer: "PreTrainedTokenizerBase"
    batch_size: int
    seed: int
    shuffle: bool
    reader: ColumnReader
    reading: Reading
    step_separator: str
    check: Callable[[TokenizedDataset], None] = field(default=lambda _: None)
    """Refuses samples that cannot be trained on."""

    _streams: tuple[RowStream, ...] = field(init=False)
    _format: KnownFormat | None = field(default=None, init=False)
    _open: tuple[StreamPosition, list[OpenStream]] | None = field(default=None, init=False)
    _warned: bool = field(default=False, init=False)

    @classmethod
    def of(
        cls,
        data: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        needed: Mapping[str, str],
        reading: Reading = "samples",
        step_separator: str = "\n",
    ) -> "StreamedData":
        """Open the training data; `needed`, `reading` and `step_separator` are as `load_columns` takes them. Raises DataError."""
        source = open_source(data.train, split=data.train_split, subset=data.subset, names=data.map, streaming=True)
        reader = ColumnReader({**dict.fromkeys(data.columns, "data.columns names"), **needed})
        return cls(data, source, tokenizer, batch_size, seed, shuffle, reader, reading, step_separator)

    @_streams.default
    def _make_streams(self) -> tuple[RowStream, ...]:
        options = {"buffer_size": self.data.buffer_size, "shuffle": self.shuffle}
        if self.data.weights is None or not self.source.datasets:
            return (RowStream(self.source.name, self.source.parts, (self.seed,), **options),)  # type: ignore[arg-type]
        streams, start = [], 0
        for number, (name, count) in enumerate(self.source.datasets):
            shards = self.source.parts[start : start + count]
            streams.append(RowStream(name, shards, (self.seed, number), **options))  # type: ignore[arg-type]
            start += count
        return tuple(streams)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Return the names of the datasets; none where there is one."""
        return tuple(name for name, _ in self.source.datasets)

    @property
    def fingerprint(self) -> str:
        """Return sha256 over the shards' names, sizes and datasets, and over what decides their order and their tokens. No row is read."""
        data = self.data
        settings = [
            *(data.format, sorted(data.map.items()), data.loss_on, data.max_length, data.overlong, data.rating, data.template),
            *(() if data.bad_rows == "error" else (data.bad_rows,)),
            *(data.weights, data.buffer_size, sorted(self.reader.needed), self.reading, self.step_separator, self.shuffle),
        ]
        identities = [part.identity for part in self.source.parts]
        shards = [count for _, count in self.source.datasets]
        told = json.dumps([settings, identities, shards, tokenizer_identity(self.tokenizer)])
        return hashlib.sha256(told.encode()).hexdigest()

    def start(self) -> StreamPosition:
        """Return the position before the first mini-batch."""
        return StreamPosition(0, 0, 0, 0.0, tuple(StreamPlace() for _ in self._streams))

    def mini_batch(self, position: StreamPosition) -> tuple[TokenizedDataset, StreamPosition]:
        """Read the mini-batch at a position; return its samples and the position after it.

        Reading on from the last position costs nothing more; any other is opened first. Raises DataError naming file and line.
        """
        if self._open is None or self._open[0] is not position:
            streams = [stream.open(place) for stream, place in zip(self._streams, position.places, strict=True)]
        else:
            streams = self._open[1]
        self._open = None
        dataset, after = self._read(streams, position)
        self._open = after, streams
        self.check(dataset)
        return dataset, after

    def describe(self) -> str:
        """Say how much there is, and how much of it waits in memory after the mini-batch that was read last."""
        sizes = [part.size for part in self.source.parts]
        known = sum(size for size in sizes if size is not None)
        shards = f"{len(sizes):,} shard{'s'[: len(sizes) != 1]}" + (f", {_bytes(known)}" if None not in sizes else "")
        rows = [row for stream in (self._open[1] if self._open else ()) for row in stream.waiting_rows]
        if not self.shuffle:
            return f"{shards}, read in their order while training"
        return f"{shards}, read while training; {len(rows):,} rows wait in memory, {_bytes(sum(count_bytes(row.content) for row in rows))}"

    def _read(self, streams: Sequence[OpenStream], position: StreamPosition) -> tuple[TokenizedDataset, StreamPosition]:
        rows: list[Row] = []
        datasets: list[int] = []
        choices = self._choices(position.rows)
        counts: Counter[str] = Counter()
        info: dict[str, Any] = {}
        bad = BadRows(self.source.name, self.data.bad_rows)
        taken, examples = 0, list[str]()
        with TokenTableWriter(None) as table:
            while (missing := self.batch_size - table.kept) >= self._per_row or not table.kept:
                start = len(rows)
                # the first row of all tells the format, and so how many samples a row makes
                for _ in range(1 if self._format is None else max(1, missing // self._per_row)):
                    number = 0 if len(streams) == 1 else next(choices)
                    drawn, taken = streams[number].draw(), taken + 1
                    row = bad.attempt(taken, partial(self._parse, len(rows), drawn))
                    bad.raise_all(taken)
                    if row is not None:
                        datasets.append(self._dataset_of(number, drawn.shard))
                        rows.append(self._refuse_ids(row))
                if self._format is None and rows:
                    recognise = partial(detect, self.data.format, rows[0], reading=self.reading)
                    self._format = bad.attempt(taken, recognise, where=rows[0].name)
                    bad.raise_all(taken)
                    if self._format is None:
                        rows.clear()
                        datasets.clear()
                if start == len(rows):
                    self._refuse_no_samples(streams, position, table.kept, bad.examples)
                    continue
                if self._per_row > self.batch_size:
                    raise DataError(
                        f"a pair of samples does not fit a mini-batch of training.batch_size = {self.batch_size}",
                        remedy="Set training.batch_size to 2 or more",
                    )
                info = self._filling(rows, start)(table)
                counts.update(info["counts"])
                examples += info["bad_rows"]
                self._refuse_no_samples(streams, position, table.kept, bad.examples + examples)
            batch = table.batch()
        counts.update({"rows": bad.dropped_count, "dropped_bad_rows": bad.dropped_count})
        tokens = TokenTable(Path(), batch, info)
        made = DataCounts(**dict(counts))  # type: ignore[arg-type]  # names of counts, which are numbers
        source = StreamedRows(self.source.name, (), datasets=self.source.datasets, drawn=rows)
        of_samples = np.asarray(datasets, dtype=np.int64)[arrow_arrays.values_of(batch.column("row"))]
        columns = label_samples(tokens, of_samples if self.source.datasets else None)
        dataset = TokenizedDataset(self.source.name, info["format"], columns, made, Path(), source, Rendering(**info["rendering"]))
        if position.rows == 0:
            warn_of_rows(self.data, made, f"the first {made.rows} rows of {self.source.name}", info["unread"])
        if made.dropped_bad_rows and not self._warned:
            self._warned = True
            warn_of_bad_rows(
                made.dropped_bad_rows, made.rows, f"those of {self.source.name} that were drawn last", bad.examples + examples
            )
        after = StreamPosition(
            position.rows + taken,
            position.samples + made.samples,
            position.dropped + made.dropped,
            min(stream.epochs for number, stream in enumerate(streams) if self._is_drawn(number)),
            tuple(stream.place for stream in streams),
        )
        return dataset, after

    @property
    def _per_row(self) -> int:
        """Return the most samples that a row makes."""
        return 2 if self._format is not None and FORMATS[self._format].gives == "pair" else 1

    def _filling(self, rows: Sequence[Row], start: int) -> TableFilling:
        """Return what tokenizes the rows from number `start` on."""
        wanted = np.arange(len(rows)) >= start
        assert self._format is not None, "the first row tells it"
        data = evolve(self.data, format=self._format)
        source = StreamedRows(self.source.name, (), drawn=rows)
        options = {"reading": self.reading, "step_separator": self.step_separator, "whole": False}
        return TableFilling(source, wanted, data, self.reader, self.tokenizer, _NO_IMAGES, "", None, **options)  # type: ignore[arg-type]

    def _parse(self, number: int, drawn: DrawnRow) -> Row:
        return self.source.make_row(number, drawn.where, drawn.content, drawn.folder)

    def _refuse_ids(self, row: Row) -> Row:
        """Return the row, which says of no other that it belongs to it."""
        for name in ID_COLUMNS:
            if row.values.get(name) is not None:
                raise row.wrong(
                    name,
                    "samples that belong together cannot be told before a stream has ended",
                    "Remove it, or set data.streaming = false",
                )
        return row

    def _is_drawn(self, stream: int) -> bool:
        return len(self._streams) == 1 or (self.data.weights or ())[stream] > 0

    def _dataset_of(self, stream: int, shard: int) -> int:
        """Return the number of the dataset of a shard."""
        if len(self._streams) > 1:
            return stream
        return (
            0
            if not self.source.datasets
            else int(np.searchsorted(np.cumsum([count for _, count in self.source.datasets]), shard, "right"))
        )

    def _choices(self, rows: int) -> Iterator[int]:
        """Yield the stream of each row, from row number `rows` on, by the weights."""
        shares = np.cumsum(np.asarray(self.data.weights or (1.0,), dtype=np.float64))
        last = int(np.flatnonzero(np.diff(shares, prepend=0.0))[-1])
        generator = np.random.PCG64(np.random.SeedSequence([self.seed, _MIX]))
        generator.advance(rows)
        while True:
            point = int(generator.random_raw()) / 2**64 * shares[-1]
            yield min(last, int(np.searchsorted(shares, point, side="right")))

    def _refuse_no_samples(
        self, streams: Sequence[OpenStream], position: StreamPosition, kept: int, examples: Sequence[str]
    ) -> None:
        """Refuse data of which a whole pass has left no sample; `examples` are what is wrong with rows that were left out."""
        if not kept and all(
            stream.epoch > place.epoch + 1
            for number, (stream, place) in enumerate(zip(streams, position.places, strict=True))
            if self._is_drawn(number)
        ):
            raise DataError(
                f"no sample of {self.source.name} is left: a pass over it dropped all of its rows",
                remedy="Raise data.max_length, or correct the dataset",
                details=examples[:MOST_NAMED],
            )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
