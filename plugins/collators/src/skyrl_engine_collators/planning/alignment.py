"""The alignment of samples in a packed row: each takes a multiple of it, so that tensor and context parallel ranks get equal parts of it."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts import Layout

Lengths = TypeVar("Lengths", int, npt.NDArray[np.int64])


def alignment_of(layout: Layout) -> int:
    """Tokens that a sample's place in a row is a multiple of.

    Sequence parallelism cuts a row into tp equal parts; context parallelism cuts every sample into 2 cp chunks, of which a rank takes one
    from either end.
    """
    return layout.tp if layout.cp == 1 else 2 * layout.tp * layout.cp


def rounded_up(tokens: Lengths, alignment: int) -> Lengths:
    """The next multiple of `alignment`, of one number or of each."""
    return -(-tokens // alignment) * alignment
