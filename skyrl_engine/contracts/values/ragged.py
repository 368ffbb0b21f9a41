"""Values of different length per sample, stored flat: the shape of everything that crosses the engine."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]
Parts = Sequence[Sequence[AnyArray]]
"""For each part, its arrays: equally many, of the same types in every part."""

Join = Callable[[list[memoryview]], bytearray | memoryview]
"""Bytes of several places end to end in memory of their own, as `bytearray().join` makes them."""


def join_fresh(pieces: list[memoryview]) -> bytearray:
    """The pieces end to end in fresh memory."""
    return bytearray().join(pieces)


def offsets_of(lengths: npt.ArrayLike) -> IntArray:
    """int64[N+1] offsets of N consecutive segments with these lengths."""
    counts = np.asarray(lengths, dtype=np.int64)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def segment_indices(offsets: IntArray, segments: IntArray) -> IntArray:
    """int64[sum of lengths]: positions in the flat axis of the chosen segments, in the order they are chosen."""
    starts = offsets[segments]
    lengths = offsets[segments + 1] - starts
    chosen = offsets_of(lengths)
    return np.arange(chosen[-1], dtype=np.int64) + np.repeat(starts - chosen[:-1], lengths)


BLOCK = 1 << 16
"""Values whose places are computed at a time: few enough to stay in the processor's cache."""

_NUMBERS = np.arange(2 * BLOCK, dtype=np.int64)
"""Kept, because fresh memory for the numbers of every block costs more than all that is done with them."""

LONG = 256
"""Mean length from which segments are taken one by one: then copying a value costs less than its place does."""

LONG_JOINED = 96
"""Mean length from which segments are joined window by window."""

WINDOWS = (64, 16, 4, 1)
"""Values of a window, which is copied in little more time than one value."""

WINDOWED_BLOCK = 4 * BLOCK
"""Values joined at a time where windows are copied: they need fewer places, so more values fit into the cache with them."""


def take_segments(
    arrays: Sequence[AnyArray], offsets: IntArray, segments: IntArray, join: Join = join_fresh
) -> tuple[list[AnyArray], IntArray]:
    """The chosen segments of arrays [total, ...] that share `offsets`, in the order they are chosen, copied; and their own offsets.

    The same as indexing each array with `segment_indices`, without ever holding an index for every value. Long segments are copied into
    the memory that `join` gives.
    """
    starts = offsets[segments]
    lengths = offsets[segments + 1] - starts
    chosen = offsets_of(lengths)
    if chosen[-1] > LONG * len(lengths):
        return [_end_to_end(values, starts, lengths, join) for values in arrays], chosen
    shifts = starts - chosen[:-1]  # from a value's place among the chosen to its place in the arrays
    taken = [np.empty((int(chosen[-1]), *values.shape[1:]), values.dtype) for values in arrays]
    for first, last in blocks(chosen, BLOCK):
        start, stop = chosen[first], chosen[last]
        places = np.repeat(shifts[first:last] + start, lengths[first:last])
        places += _numbers(len(places))
        for values, target in zip(arrays, taken, strict=True):
            np.take(values, places, axis=0, out=target[start:stop], mode="clip")  # checking places would buffer the result
    return taken, chosen


def _end_to_end(values: AnyArray, starts: IntArray, lengths: IntArray, join: Join) -> AnyArray:
    """`values[start : start + length]` of every segment in memory of their own: joined as bytes, two thirds of what np.concatenate costs."""
    size = values.itemsize * math.prod(values.shape[1:])
    bounds = zip((starts * size).tolist(), ((starts + lengths) * size).tolist(), strict=True)
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    joined = join([flat[start:stop] for start, stop in bounds])
    shape = (int(lengths.sum()), *values.shape[1:])
    return np.frombuffer(joined, values.dtype).reshape(shape)  # np.ndarray(buffer=...) would not keep the view that it is given


def join_segments(parts: Parts, offsets: Sequence[IntArray], order: IntArray) -> tuple[list[AnyArray], IntArray]:
    """Segments of several parts as one, in the given order; and their offsets.

    `parts[p]` are arrays [total of p] that share `offsets[p]`, equally many of the same types in every part. `order` numbers segments
    over all parts, end to end; each at most once, and those that do not occur are dropped. Values are read in their old order and written to
    their new place: a processor waits for what it reads, not for what it writes.
    """
    lengths = np.concatenate([array[1:] - array[:-1] for array in offsets])  # np.diff costs more than the subtraction
    new = offsets_of(lengths[order])
    targets = np.full(len(lengths), -1, dtype=np.int64)
    targets[order] = new[:-1]
    join = _join_windows if new[-1] > LONG_JOINED * len(order) else _join_values
    return join(parts, offsets, targets, lengths, int(new[-1])), new


def _join_windows(parts: Parts, offsets: Sequence[IntArray], targets: IntArray, lengths: IntArray, total: int) -> list[AnyArray]:
    """Copy `total` values, many at a time. `targets` say where each segment begins among the joined, -1 where it is dropped.

    A segment is cut into windows as wide as the widest of `WINDOWS` that fits into it; the last one overlaps the one before.
    """
    joined = [np.empty(total, values.dtype) for values in parts[0]]
    for first, last, pieces in _pieces(parts, lengths, offsets, WINDOWED_BLOCK):
        begins = offsets_of(lengths[first:last])[:-1]
        copies = list(_windows(begins, targets[first:last], lengths[first:last]))
        for values, source in zip(joined, pieces, strict=True):
            read = np.ascontiguousarray(source, values.dtype)
            for width, olds, news in copies:
                _wide(values, width)[news] = _wide(read, width)[olds]
    return joined


def _windows(begins: IntArray, targets: IntArray, lengths: IntArray) -> Iterator[tuple[int, IntArray, IntArray]]:
    """For each width in use, where its windows begin in the old and in the new places."""
    wider = np.iinfo(np.int64).max
    for width in WINDOWS:
        chosen = np.flatnonzero((targets >= 0) & (lengths >= width) & (lengths < wider))
        wider = width
        if len(chosen):
            counts = -(-lengths[chosen] // width)
            steps = _numbers(int(counts.sum())) - np.repeat(offsets_of(counts)[:-1], counts)
            shifts = np.minimum(steps * width, np.repeat(lengths[chosen] - width, counts))
            yield width, shifts + np.repeat(begins[chosen], counts), shifts + np.repeat(targets[chosen], counts)


def _wide(values: AnyArray, width: int) -> AnyArray:
    """Element i is the bytes of `values[i : i + width]`; nothing is copied."""
    size = values.dtype.itemsize
    return np.ndarray(len(values) - width + 1, f"V{width * size}", values.view(np.uint8), strides=size)


def _join_values(parts: Parts, offsets: Sequence[IntArray], targets: IntArray, lengths: IntArray, total: int) -> list[AnyArray]:
    """The same, with a place for every value, as much at a time as stays in the processor's cache."""
    joined = [np.empty(total, values.dtype) for values in parts[0]]
    for first, last, pieces in _pieces(parts, lengths, offsets, BLOCK):
        piece_lengths = lengths[first:last]
        has_target = targets[first:last] >= 0
        places = np.repeat(targets[first:last] - offsets_of(piece_lengths)[:-1], piece_lengths)
        places += _numbers(len(places))
        chosen: AnyArray | slice = slice(None) if has_target.all() else np.repeat(has_target, piece_lengths)
        places = places[chosen]
        for values, piece in zip(joined, pieces, strict=True):
            values[places] = piece[chosen]
    return joined


def _pieces(
    parts: Parts, lengths: IntArray, offsets: Sequence[IntArray], block: int
) -> Iterator[tuple[int, int, Iterator[AnyArray]]]:
    """Segments end to end over all parts, in blocks: the first, the one after the last, and each array's values of them."""
    old, bounds = offsets_of(lengths), offsets_of([array[-1] for array in offsets]).tolist()
    for first, last in blocks(old, block):
        start, stop = int(old[first]), int(old[last])
        among = range(bisect_right(bounds, start) - 1, bisect_left(bounds, stop))
        pieces_of_arrays = (
            [parts[p][number][max(start - bounds[p], 0) : stop - bounds[p]] for p in among] for number in range(len(parts[0]))
        )
        yield first, last, (pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in pieces_of_arrays)


def _numbers(count: int) -> IntArray:
    """0 to `count` - 1, to be read only."""
    return _NUMBERS[:count] if count <= len(_NUMBERS) else np.arange(count, dtype=np.int64)


def blocks(offsets: IntArray, block: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole segments that hold about `block` values, more only where one segment does; none where there is no value."""
    cuts = np.searchsorted(offsets, np.append(np.arange(0, offsets[-1], block), offsets[-1]))
    return pairwise(np.unique(cuts).tolist())


@frozen(eq=False)
class Ragged:
    """`values` [total, ...] flat over samples, and `offsets` int64[N+1]; sample i owns `values[offsets[i]:offsets[i + 1]]`."""

    values: AnyArray
    offsets: IntArray = field()

    @offsets.validator
    def _check(self, _attribute: object, offsets: IntArray) -> None:
        assert offsets.dtype == np.int64, "offsets must be int64"
        assert offsets.ndim == 1, "offsets must be a vector"
        assert len(offsets), "offsets must be [N+1]"
        assert offsets[0] == 0, "offsets must start at 0"
        assert offsets[-1] == len(self.values), "offsets must end at the number of values"

    @classmethod
    def from_list(cls, rows: Iterable[npt.ArrayLike], dtype: npt.DTypeLike) -> "Ragged":
        """One array per sample, concatenated and cast to `dtype`."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
        return cls(values, offsets_of([len(array) for array in arrays]))

    @classmethod
    def concat(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The samples of all parts, one after the other."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sample: int) -> AnyArray:
        return self.values[self.offsets[sample] : self.offsets[sample + 1]]

    def __iter__(self) -> Iterator[AnyArray]:
        return (self.values[start:stop] for start, stop in pairwise(self.offsets.tolist()))

    @property
    def lengths(self) -> IntArray:
        """int64[N]: how many values each sample owns."""
        return self.offsets[1:] - self.offsets[:-1]  # np.diff costs more than the subtraction

    def take(self, samples: npt.ArrayLike) -> "Ragged":
        """The chosen samples in the chosen order, copied."""
        (values,), offsets = take_segments([self.values], self.offsets, np.asarray(samples, dtype=np.int64))
        return Ragged(values, offsets)


@frozen(eq=False)
class RaggedView:
    """Samples within `values` [total, ...] of somebody else: sample i owns `values[starts[i] : starts[i] + lengths[i]]`, int64[N] each.

    Choosing samples copies none of them: images and expert routes, each of which may be megabytes, stay where they are until a rank
    builds from them. Pickling takes the chosen samples alone, as slices that a transport may take out of band (protocol 5, as Ray
    does) and then does not copy either.
    """

    values: AnyArray
    starts: IntArray
    lengths: IntArray = field()

    @lengths.validator
    def _check(self, _attribute: object, lengths: IntArray) -> None:
        assert self.starts.dtype == lengths.dtype == np.int64, "starts and lengths must be int64"
        assert self.starts.shape == lengths.shape == (len(lengths),), "starts and lengths must be [N]"
        assert self.starts.min(initial=0) >= 0, "samples must not begin before their values"
        assert lengths.min(initial=0) >= 0, "lengths must not be negative"
        assert (self.starts + lengths).max(initial=0) <= len(self.values), "samples must not reach beyond their values"

    @classmethod
    def of(cls, ragged: Ragged) -> "RaggedView":
        """All samples of `ragged`."""
        return cls(ragged.values, ragged.offsets[:-1], ragged.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> AnyArray:
        return self.values[self.starts[sample] : self.starts[sample] + self.lengths[sample]]

    def take(self, samples: npt.ArrayLike) -> "RaggedView":
        """The chosen samples in the chosen order, over the same values."""
        chosen = np.asarray(samples, dtype=np.int64)
        return RaggedView(self.values, self.starts[chosen], self.lengths[chosen])

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_own_values, (self._runs(), self.lengths)

    def _runs(self) -> list[AnyArray]:
        """All samples' values in order, as few slices; one without values where there is none, which keeps dtype and shape."""
        filled = self.lengths > 0
        starts, lengths = self.starts[filled], self.lengths[filled]
        ends = starts + lengths
        first = np.flatnonzero(np.append(True, starts[1:] != ends[:-1])[: len(starts)])
        last = np.append(first[1:], len(starts))[: len(first)] - 1
        runs = zip(starts[first].tolist(), ends[last].tolist(), strict=True)
        return [self.values[start:stop] for start, stop in runs] or [self.values[:0]]


def _with_own_values(runs: list[AnyArray], lengths: IntArray) -> RaggedView:
    return RaggedView(runs[0] if len(runs) == 1 else np.concatenate(runs), offsets_of(lengths)[:-1], lengths)
