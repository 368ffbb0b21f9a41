"""Write many pieces of a flat array into another in one pass."""

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts import AnyArray, IntArray


def write_segments(
    out: AnyArray, fill: npt.ArrayLike, source: AnyArray, *, starts: IntArray, lengths: IntArray, places: IntArray
) -> None:
    """`out[places[i] : places[i] + lengths[i]] = source[starts[i] : starts[i] + lengths[i]]` for all n pieces, and `fill` elsewhere.

    `out` and `source` [total, ...] are cut along their first axis, `fill` is what one place holds; `starts`, `lengths`, `places` int64[n];
    places ascend and pieces do not overlap. Every element is written once, by one concatenation of views: no array of indices, which would
    be as large as what is written, is ever made.
    """
    ends = places + lengths
    gaps = np.append(places, len(out)) - np.append(0, ends)
    assert (gaps >= 0).all(), "pieces overlap or reach outside"
    begins = np.zeros(2 * len(starts) + 1, dtype=np.int64)
    begins[1::2] = starts
    counts = np.empty(len(begins), dtype=np.int64)
    counts[0::2] = gaps
    counts[1::2] = lengths
    present = np.flatnonzero(counts)
    if not len(present):
        return
    # One place, repeated by its stride.
    filler = np.broadcast_to(np.asarray(fill, dtype=out.dtype), (int(gaps.max()), *out.shape[1:]))
    sources = (filler, source)
    begins, stops = begins[present], (begins + counts)[present]
    pieces = [
        sources[which][start:stop]
        for which, start, stop in zip((present & 1).tolist(), begins.tolist(), stops.tolist(), strict=True)
    ]
    np.concatenate(pieces, out=out, casting="same_kind")
