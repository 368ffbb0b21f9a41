"""The alignment of samples in a packed row: each is padded to a multiple of it, so that ranks that share the row get equal parts."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts import Layout

Lengths = TypeVar("Lengths", int, npt.NDArray[np.int64])


def alignment_of(layout: Layout) -> int:
    """Return the number of tokens to a multiple of which each sample is padded.

    Sequence parallelism cuts a row into tp equal parts; context parallelism cuts every sample into 2 cp chunks, of which a rank takes one
    from either end.
    """
    return layout.tp if layout.cp == 1 else 2 * layout.tp * layout.cp


def round_up(tokens: Lengths, alignment: int) -> Lengths:
    """Round a number, or each of an array, up to a multiple of `alignment`."""
    return -(-tokens // alignment) * alignment
