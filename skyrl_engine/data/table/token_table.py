"""Tokenized samples in one Arrow file: a single record batch, so that every column is one piece of memory and is read without a copy."""

import io
import json
import mmap
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, offsets_of
from skyrl_engine.data.images.processor import MeasuredImage
from skyrl_engine.data.table import arrow_arrays
from skyrl_engine.data.table.sample_columns import Carried
from skyrl_engine.data.text.tokenization import TokenizedSample
from skyrl_engine.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PARTIAL_SUFFIX = ".partial"
_INFO = b"skyrl_engine"
_VALUE = "value "
"""Begins the names of columns that hold one value per sample: no column of the data is called so."""


@frozen(eq=False)
class TokenTable:
    """An open file of tokenized samples; `info` holds the plain values that were written with it.

    `batch` has the columns input_ids, loss_mask, num_actions, row, perhaps images and ids, and under names of their own what samples carry
    on the action axis.
    """

    path: Path
    batch: "pa.RecordBatch"
    info: dict[str, Any]

    @property
    def action_columns(self) -> list[str]:
        """Return the names of the columns with a number, or several, per response token."""
        import pyarrow as pa

        def is_one(kind: pa.DataType) -> bool:
            if not pa.types.is_large_list(kind):
                return False
            return bool(kind.value_type == pa.float32() or pa.types.is_fixed_size_list(kind.value_type))

        return [field.name for field in self.batch.schema if is_one(field.type) and field.name != "loss_mask"]

    @property
    def sample_values(self) -> dict[str, str]:
        """Return the columns with one value per sample, other than ids, by the name of the value."""
        names = self.batch.schema.names
        return {name.removeprefix(_VALUE): name for name in names if name.startswith(_VALUE)}

    @property
    def images(self) -> "TableImages | None":
        """Return the images of all samples; None if no sample has any."""
        if "images" not in self.batch.schema.names:
            return None
        column = self.batch.column("images")
        facts = self.batch.column("image_facts").values.to_numpy().reshape(-1, 4)
        return TableImages(column.values.to_numpy(zero_copy_only=False), facts, column.offsets.to_numpy())


@frozen(eq=False)
class TableImages:
    """The images of all samples, one after the other: each one's path as its row has it (object [images], empty where the row holds the
    bytes), and int64 [images, 4], its file's CRC-32 and grid. Sample i owns those from `offsets[i]` to `offsets[i + 1]`, int64[N+1].
    """

    written: AnyArray
    facts: IntArray
    offsets: IntArray


def open_table(path: Path) -> TokenTable | None:
    """Open the table in a file, memory-mapped, its checksum verified; None if there is no file or it is damaged."""
    import pyarrow as pa

    if not path.is_file():
        return None
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        info = json.loads(reader.schema.metadata[_INFO])
        batch = reader.get_batch(0)
        batch.validate(full=True)
        sound = _checksum(batch) == info["checksum"]
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return TokenTable(path, batch, info) if sound else None


class TokenTableWriter:
    """Collects samples in unnamed files in the target's folder, then writes them as one record batch: memory stays bounded by the offsets.

    Without a folder it collects a few in memory.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lengths: list[int] = []
        self._actions: list[int] = []
        self._rows: list[int] = []
        self._images: list[tuple[MeasuredImage, ...]] = []
        self._ids: dict[str, list[int]] = {}
        self._columns: dict[str, IO[bytes]] = {}
        self._values: dict[str, list[str | float]] = {}
        self._fractional = False
        self._kept: AnyArray | None = None
        self._forms: dict[str, AnyArray] = {}
        with _disk(directory):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            self._tokens = self._open_file()
            self._mask = self._open_file()

    def _open_file(self) -> IO[bytes]:
        """Open a place for bytes, which `__exit__` closes."""
        return io.BytesIO() if self._directory is None else tempfile.TemporaryFile(dir=self._directory)

    @property
    def kept(self) -> int:
        """Return the number of samples so far that will be written."""
        return (
            len(self._lengths) if self._kept is None else int(np.count_nonzero(self._kept)) + len(self._lengths) - len(self._kept)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        # a full disk may refuse what is still buffered; by now there is an error on its way that says so
        for file in (self._tokens, self._mask, *self._columns.values()):
            with suppress(OSError):
                file.close()

    def append(self, sample: TokenizedSample, carried: Carried) -> None:
        """Add a sample; its response starts at its first token that carries loss. All samples carry the same columns and ids."""
        first = int(np.argmax(sample.loss))
        assert sample.loss[first], "a sample without loss"
        with _disk(self._directory):
            if not self._lengths:
                self._ids = {name: [] for name in carried.ids}
                self._values = {name: [] for name in carried.values}
                for name, values in carried.columns.items():
                    self._forms[name] = values[:0]
                    self._columns[name] = self._open_file()
            self._tokens.write(np.ascontiguousarray(sample.input_ids, dtype=np.int32).tobytes())
            self._mask.write((sample.loss if sample.weights is None else sample.weights)[first:].astype(np.float32).tobytes())
            self._fractional |= sample.weights is not None
            for name, file in self._columns.items():
                values, form = carried.columns[name], self._forms[name]
                assert values.shape == (len(sample.loss) - first, *form.shape[1:]), f"{name} is not on the action axis"
                file.write(values.astype(form.dtype).tobytes())
        for name, ids in self._ids.items():
            ids.append(carried.ids[name])
        for name, of_samples in self._values.items():
            of_samples.append(carried.values[name])
        self._lengths.append(len(sample.loss))
        self._actions.append(len(sample.loss) - first)
        self._rows.append(sample.number)
        self._images.append(sample.images)

    def keep(self, mask: AnyArray) -> None:
        """Write only these of the last N samples, bool[N]; those before them stay as they were."""
        before = np.zeros(0, dtype=np.bool_) if self._kept is None else self._kept
        others = np.ones(len(self._lengths) - len(mask) - len(before), dtype=np.bool_)
        self._kept = np.concatenate([before, others, mask])

    def finish(self, path: Path, info: dict[str, Any]) -> None:
        """Write the table and `info` (plain values) beside `path`, flush them to the disk, and rename."""
        assert self._directory is not None, "samples in memory have no file"
        with _disk(self._directory):
            batch = self.batch()
            described = json.dumps({**info, "checksum": _checksum(batch)}).encode()
            _write_atomically(path, batch.replace_schema_metadata({_INFO: described}))

    def batch(self) -> "pa.RecordBatch":
        """Return the samples that are kept as one record batch."""
        import pyarrow as pa

        with _disk(self._directory):
            columns = {
                "input_ids": _lists(_contents(self._tokens), pa.int32(), self._lengths),
                "loss_mask": _weights(_contents(self._mask), self._actions, fractional=self._fractional),
                "num_actions": arrow_arrays.numbers(np.asarray(self._actions, dtype=np.int64)),
                "row": arrow_arrays.numbers(np.asarray(self._rows, dtype=np.int64)),
                **{name: arrow_arrays.numbers(np.asarray(ids, dtype=np.int64)) for name, ids in self._ids.items()},
                **{name: _column(_contents(file), self._forms[name], self._actions) for name, file in self._columns.items()},
            }
            columns |= {f"{_VALUE}{name}": pa.array(values) for name, values in self._values.items()}
            if any(self._images):
                columns |= _image_columns(self._images)
            batch = pa.record_batch(list(columns.values()), names=list(columns))
            if self._kept is not None:
                later = np.ones(len(self._lengths) - len(self._kept), dtype=np.bool_)
                batch = batch.filter(pa.array(np.concatenate([self._kept, later])))
            return batch


def _contents(file: IO[bytes]) -> "pa.Buffer":
    """Return the file's content, memory-mapped."""
    import pyarrow as pa

    if isinstance(file, io.BytesIO):
        return pa.py_buffer(file.getvalue())
    file.flush()
    if os.fstat(file.fileno()).st_size == 0:
        return pa.py_buffer(b"")
    return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _lists(values: "pa.Buffer", kind: "pa.DataType", lengths: Sequence[int]) -> "pa.LargeListArray":
    import pyarrow as pa

    offsets = offsets_of(np.asarray(lengths, dtype=np.int64))
    flat = pa.Array.from_buffers(kind, int(offsets[-1]), [None, values])
    return pa.LargeListArray.from_arrays(arrow_arrays.numbers(offsets), flat)


def _weights(weights: "pa.Buffer", lengths: Sequence[int], *, fractional: bool) -> "pa.LargeListArray":
    """Return the loss weights, which are float32, as uint8 where all are 0 and 1."""
    import pyarrow as pa

    if fractional:
        return _lists(weights, pa.float32(), lengths)
    mask = np.frombuffer(weights, dtype=np.float32).astype(np.uint8)
    return _lists(pa.py_buffer(mask), pa.uint8(), lengths)


def _column(values: "pa.Buffer", form: AnyArray, lengths: Sequence[int]) -> "pa.LargeListArray":
    """Return a list per sample of numbers, or of lists of k numbers, as `form` [0] or [0, k] has them."""
    import pyarrow as pa

    kind = pa.from_numpy_dtype(form.dtype)
    if form.ndim == 1:
        return _lists(values, kind, lengths)
    offsets, width = offsets_of(np.asarray(lengths, dtype=np.int64)), form.shape[1]
    flat = pa.Array.from_buffers(kind, int(offsets[-1]) * width, [None, values])
    return pa.LargeListArray.from_arrays(arrow_arrays.numbers(offsets), pa.FixedSizeListArray.from_arrays(flat, width))


def _image_columns(samples: Sequence[Sequence[MeasuredImage]]) -> dict[str, "pa.LargeListArray"]:
    import pyarrow as pa

    images = [image for own in samples for image in own]
    facts = np.array([(image.checksum, *image.grid) for image in images], dtype=np.int64)
    counts = [len(own) for own in samples]
    written = pa.array([image.written for image in images], type=pa.large_string())
    return {
        "images": pa.LargeListArray.from_arrays(arrow_arrays.numbers(offsets_of(counts)), written),
        "image_facts": _lists(pa.py_buffer(facts.tobytes()), pa.int64(), [4 * count for count in counts]),
    }


def _write_atomically(path: Path, batch: "pa.RecordBatch") -> None:
    import pyarrow as pa

    handle, name = tempfile.mkstemp(dir=path.parent, suffix=PARTIAL_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _checksum(batch: "pa.RecordBatch") -> int:
    """Return CRC-32 over the values and offsets of every column."""
    import pyarrow as pa

    value = 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "images" or pa.types.is_string(column.type):
            value = zlib.crc32(json.dumps(column.to_pylist()).encode(), value)
        elif pa.types.is_large_list(column.type):
            inner = column.values.flatten() if pa.types.is_fixed_size_list(column.values.type) else column.values
            value = zlib.crc32(arrow_arrays.values_of(inner).data, zlib.crc32(arrow_arrays.values_of(column.offsets).data, value))
        else:
            value = zlib.crc32(arrow_arrays.values_of(column).data, value)
    return value


@contextmanager
def _disk(directory: Path | None) -> Iterator[None]:
    """Turn an error of the file system into a DataError that names the place."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the token cache {directory} cannot be written: {error.strerror or error}",
            remedy="Free space there, or set data.cache or SKYRL_ENGINE_CACHE to another directory",
        ) from error
