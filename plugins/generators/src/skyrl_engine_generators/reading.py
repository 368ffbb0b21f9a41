"""The layout of a pass that reads prompts on a CPU: the new tokens of all rows in one line, and the pieces that they attend in."""

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine_generators.buckets import PIECE, PLACES, round_up


@frozen(eq=False)
class LinePiece:
    """The n-th piece of the first rows, which have so many: `tokens` int64[rows, PIECE] of the line, which see places before `end`."""

    tokens: Tensor
    end: int


@frozen(eq=False)
class ReadLayout:
    """Rows that are read from `starts` on, so many `lengths` of new tokens each. Those with more pieces come first.

    `line` int64[tokens] says for each token of the line at which place of all pieces, one after the other, it stands.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    pieces: tuple[LinePiece, ...]
    line: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> "ReadLayout":
        """Lay rows out, whose pieces begin at multiples of `PIECE`, wherever the rows are read from."""
        counts = [count_pieces(start, length) for start, length in zip(starts, lengths, strict=True)]
        assert counts == sorted(counts, reverse=True), "rows with more pieces come first"
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        shifts = torch.tensor([start % PIECE for start in starts])
        lasts = torch.tensor(lengths) - 1
        pieces, line, passed = [], torch.zeros(int(offsets[-1]), dtype=torch.long), 0
        for number in range(counts[0]):
            rows = sum(count > number for count in counts)
            at = torch.arange(number * PIECE, (number + 1) * PIECE) - shifts[:rows, None]
            # tokens of a piece that the pass does not read are left out: a neighbour takes their place
            own = at.clamp(min=0).minimum(lasts[:rows, None])
            tokens = own + offsets[:rows, None]
            end = max(round_up((start // PIECE + number + 1) * PIECE, PLACES) for start in starts[:rows])
            pieces.append(LinePiece(tokens, end))
            read = own == at
            line[tokens[read]] = torch.arange(passed, passed + rows * PIECE).view(rows, PIECE)[read]
            passed += rows * PIECE
        return cls(tuple(starts), tuple(lengths), tuple(pieces), line)

    def rows(self) -> list[slice]:
        """Return the tokens of each row in the line."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]


def count_pieces(start: int, length: int) -> int:
    """Count the pieces that a row's new tokens stand in."""
    return -(-(start % PIECE + length) // PIECE)


READ_LAYOUT: ContextVar[ReadLayout | None] = ContextVar("READ_LAYOUT", default=None)
"""The layout of the pass under way; None while it reads no prompts."""
