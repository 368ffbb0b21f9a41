"""Fill a token table with the rows of a source: recognise their format, tokenize them, read their images, bound their length."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.images.processor import Vision
from skyrl_engine.data.images.tokens import ImageInspection, digest_of_states
from skyrl_engine.data.sources.formats import Example, KnownFormat, detect, to_example
from skyrl_engine.data.sources.rows import BoolArray, Row, Source
from skyrl_engine.data.table.sample_columns import Carried, ColumnReader, IdReader
from skyrl_engine.data.table.token_table import TokenTableWriter
from skyrl_engine.data.text.messages import Conversation
from skyrl_engine.data.text.tokenization import SampleTokenizer, TokenizedSample
from skyrl_engine.errors import DataError

Progress = Callable[[str, int, int], None]

_SAMPLES_PER_BATCH = 256


@frozen(eq=False)
class TableFilling:
    """Everything that turns the wanted rows of a source into samples of a table."""

    source: Source
    wanted: BoolArray
    data: DataConfig
    reader: ColumnReader
    tokenizer: Any
    vision: Vision
    label: str
    progress: Progress | None

    def __call__(self, table: TokenTableWriter) -> dict[str, Any]:
        """Write the kept samples to `table`; return counts, format, a digest of the image files, and the image files of dropped samples."""
        total = int(np.count_nonzero(self.wanted))
        counts: Counter[str] = Counter()
        kind: KnownFormat | None = None
        ids: IdReader | None = None
        encode = SampleTokenizer(self.tokenizer, all_turns=self.data.loss_on == "all")
        images = ImageInspection(self.vision, self.data.bad_images)
        files: set[str] = set()
        reachable: set[int] = set()
        for batch in _batches(self.source.rows(self.wanted)):
            kind = kind or detect(self.data.format, batch[0])
            ids = ids or IdReader(batch[0])
            for row, example, whole in self._samples(batch, kind, encode, images):
                if isinstance(example, Conversation):
                    counts["excluded_turns"] += example.excluded
                counts["removed_reasoning"] += whole.removed_reasoning
                sample = _fitted(self.data, whole, counts)
                if sample is not None:
                    if any(not image.written for image in sample.images):
                        part = int(self.source.parts_of(row.number))
                        if part not in reachable:
                            self.source.row(row.number)  # refuses now what no batch could read
                            reachable.add(part)
                    table.append(sample, Carried(self.reader(row, whole, sample), ids(row)))
                    files |= _files(example)
            counts["rows"] += len(batch)
            if self.progress is not None:
                self.progress(self.label, counts["rows"], total)
        counts["dropped_bad_images"] = images.dropped
        return {
            "counts": dict(counts),
            "format": kind,
            "files": digest_of_states(images.seen),
            "others": sorted(images.seen.keys() - files),
        }

    def _samples(
        self, batch: Sequence[Row], kind: KnownFormat, encode: SampleTokenizer, images: ImageInspection
    ) -> Iterator[tuple[Row, Example, TokenizedSample]]:
        """Yield the rows whose images can be used, with their image tokens."""
        has_template = bool(self.tokenizer.chat_template)
        read = [(row, images.attempt(partial(to_example, row, kind, has_template=has_template))) for row in batch]
        pairs = [(row, example) for row, example in read if example is not None]
        encoded = encode((row.number, row.name, example) for row, example in pairs)
        laying = images.look([example for _, example in pairs])
        for (row, example), lay, sample in zip(pairs, laying, encoded, strict=True):
            laid = images.attempt(partial(lay, sample))
            if laid is not None:
                yield row, example, laid


def _files(example: Example) -> set[str]:
    images = example.images if isinstance(example, Conversation) else ()
    return {str(image.path) for image in images if image.path is not None}


def _batches(rows: Iterator[Row]) -> Iterator[Sequence[Row]]:
    while batch := list(islice(rows, _SAMPLES_PER_BATCH)):
        yield batch


def _fitted(data: DataConfig, sample: TokenizedSample, counts: Counter[str]) -> TokenizedSample | None:
    """Cut the sample to `data.max_length`, or return None if it is dropped; the first token, which has no predecessor, loses its loss."""
    loss = sample.loss.copy()
    loss[:1] = False
    if not loss.any():
        counts["dropped_without_loss"] += 1
        return None
    limit = data.max_length
    if limit is not None and len(loss) > limit:
        if data.overlong == "error":
            raise DataError(
                f"{sample.name} has {len(loss)} tokens, more than data.max_length = {limit}",
                remedy="Raise data.max_length, or set data.overlong to drop or truncate",
            )
        loss = loss[:limit]
        if data.overlong == "drop" or sample.images or not loss.any():  # a cut would part an image from its tokens
            counts["dropped_overlong"] += 1
            return None
        counts["truncated"] += 1
    counts.update(
        samples=1,
        tokens=len(loss),
        loss_tokens=int(np.count_nonzero(loss)),
        boundary_tokens=sample.boundary_tokens,
        images=len(sample.images),
        image_tokens=sample.image_tokens,
    )
    return evolve(sample, input_ids=sample.input_ids[: len(loss)], loss=loss)
