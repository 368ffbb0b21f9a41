"""Cut one rank's samples into micro-batches: by rows, by a budget of tokens (padding included), or not at all."""

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
    sizes, widths = units.sizes, units.maxima(lengths.tokens)
    if limits.rows is not None and (sizes > limits.rows).any():
        unit = int(np.argmax(sizes > limits.rows))
        raise DataError(
            f"{_named(units, lengths, unit)} stay together in {int(sizes[unit])} rows where a micro-batch holds {limits.rows}",
            remedy=f"Raise micro_batch_rows to at least {int(sizes.max())}",
        )
    if limits.tokens is not None and (sizes * widths > limits.tokens).any():
        unit = int(np.argmax(sizes * widths > limits.tokens))
        single = sizes[unit] == 1
        occupied = "tokens" if single else "tokens, padding included,"
        raise DataError(
            f"{_named(units, lengths, unit)} {'takes' if single else 'take'} {int(sizes[unit] * widths[unit])} {occupied} "
            f"where a micro-batch holds {limits.tokens}",
            remedy=f"Raise micro_batch_tokens to at least {int((sizes * widths).max())}, or shorten the samples",
        )


def micro_batches(units: Bundles, lengths: SampleLengths, limits: Limits) -> list[IntArray]:
    """Return the samples (int64, ascending) of each micro-batch, with whole units. The units must have passed `check_limits`.

    With a budget of tokens, units of similar length share a micro-batch, longest first, which needs little padding; otherwise they keep
    their order.
    """
    if not len(units):
        return []
    sizes, widths = units.sizes, units.maxima(lengths.tokens)
    if limits.tokens is not None:
        order = np.argsort(-widths, kind="stable")
        units, sizes, widths = units.take(order), sizes[order], widths[order]
    rows = offsets_of(sizes)
    most = int(rows[-1]) if limits.rows is None else min(limits.rows, int(rows[-1]))
    cuts = [0]
    while cuts[-1] < len(units):
        first = cuts[-1]  # with a budget of tokens the longest unit of its micro-batch
        room = most if limits.tokens is None else min(most, limits.tokens // max(1, int(widths[first])))
        assert room >= sizes[first], "a unit that fits nowhere"
        cuts.append(int(np.searchsorted(rows, rows[first] + room, side="right")) - 1)
    return units.runs(cuts[:-1])


def _named(units: Bundles, lengths: SampleLengths, unit: int) -> str:
    ids = lengths.sample_ids[units.members[unit]]
    return (
        f"sample {int(ids[0])}"
        if len(ids) == 1
        else f"samples {ids[:5].tolist()} of unit {int(lengths.unit_ids[units.members[unit][0]])}"
    )
