"""Cut each rank's units into micro-batches: by rows, by a budget of tokens (padding included), or not at all."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from skyrl_engine import DataError
from skyrl_engine.contracts import Bundles, IntArray, SampleLengths, offsets_of


@frozen
class Limits:
    """The most a micro-batch may hold, in rows and in tokens (rows x width); None means no limit."""

    rows: int | None
    tokens: int | None

    def units_per_micro_batch(self, units: Bundles) -> int | None:
        """Return how many units of the largest size fit by rows; None without a limit on rows. `units` have passed `check_limits`."""
        return None if self.rows is None else self.rows // int(units.sizes.max())


def check_limits(units: Bundles, lengths: SampleLengths, limits: Limits) -> None:
    """Raises DataError naming the sample (or the unit's samples) that fits into no micro-batch."""
    sizes = units.sizes
    if limits.rows is not None and (sizes > limits.rows).any():
        unit = int(np.argmax(sizes > limits.rows))
        raise DataError(
            f"{_describe_unit(units, lengths, unit)} stay together in {int(sizes[unit])} rows where a micro-batch holds {limits.rows}",
            remedy=f"Raise micro_batch_rows to at least {int(sizes.max())}",
        )
    if limits.tokens is None:
        return
    widths = units.maxima(lengths.tokens)
    if (sizes * widths > limits.tokens).any():
        unit = int(np.argmax(sizes * widths > limits.tokens))
        single = sizes[unit] == 1
        occupied = "tokens" if single else "tokens, padding included,"
        raise DataError(
            f"{_describe_unit(units, lengths, unit)} {'takes' if single else 'take'} {int(sizes[unit] * widths[unit])} {occupied} "
            f"where a micro-batch holds {limits.tokens}",
            remedy=f"Raise micro_batch_tokens to at least {int((sizes * widths).max())}, or shorten the samples",
        )


def cuts(sizes: IntArray, widths: IntArray, bounds: Sequence[int], limits: Limits) -> list[list[int]]:
    """Return the units that the micro-batches of each rank begin with; rank r has the units from `bounds[r]` up to `bounds[r + 1]`.

    Units have `sizes` rows and `widths` tokens, int64[n] each; a micro-batch ends where the next unit would not fit. They must have passed
    `check_limits`.
    """
    if limits.tokens is not None:
        listed = sizes.tolist(), widths.tolist()
        return [_cuts_by_tokens(*listed, begin, end, limits) for begin, end in pairwise(bounds)]
    if limits.rows is None:
        return [[begin] if begin < end else [] for begin, end in pairwise(bounds)]
    if (sizes == sizes[0]).all():  # the usual case, every sample on its own
        step = limits.rows // int(sizes[0])
        return [list(range(begin, end, step)) for begin, end in pairwise(bounds)]
    rows = offsets_of(sizes).tolist()
    return [_cuts_by_rows(rows, begin, end, limits.rows) for begin, end in pairwise(bounds)]


def _cuts_by_rows(rows: list[int], begin: int, end: int, most: int) -> list[int]:
    begins = []
    while begin < end:
        begins.append(begin)
        begin = bisect_right(rows, rows[begin] + most) - 1
        assert begin > begins[-1], "a unit that fits nowhere"
    return begins


def _cuts_by_tokens(sizes: list[int], widths: list[int], begin: int, end: int, limits: Limits) -> list[int]:
    assert limits.tokens is not None
    begins: list[int] = []
    rows = width = 0
    for unit in range(begin, end):
        rows, width = rows + sizes[unit], max(width, widths[unit], 1)  # a sample without a token counts as one of one
        if not begins or rows * width > limits.tokens or (limits.rows is not None and rows > limits.rows):
            begins.append(unit)
            rows, width = sizes[unit], max(widths[unit], 1)
    return begins


def _describe_unit(units: Bundles, lengths: SampleLengths, unit: int) -> str:
    ids = lengths.sample_ids[units.members[unit]]
    return (
        f"sample {int(ids[0])}"
        if len(ids) == 1
        else f"samples {ids[:5].tolist()} of unit {int(lengths.unit_ids[units.members[unit][0]])}"
    )
