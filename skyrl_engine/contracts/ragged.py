"""Values of different length per sample, stored flat: the shape of everything that crosses the engine."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


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

    @property
    def lengths(self) -> IntArray:
        """int64[N]: how many values each sample owns."""
        return np.diff(self.offsets)

    def take(self, samples: npt.ArrayLike) -> "Ragged":
        """The chosen samples in the chosen order, copied."""
        chosen = np.asarray(samples, dtype=np.int64)
        return Ragged(self.values[segment_indices(self.offsets, chosen)], offsets_of(self.lengths[chosen]))
