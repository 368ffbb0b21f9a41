"""The ways in which the rows of one optimizer step are cut."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from attrs import frozen

from skyrl_engine.errors import DataError
from skyrl_engine.proof.forwards import Forward
from skyrl_engine.proof.row_kinds import Row, find_kind, list_sequences


@frozen(kw_only=True)
class TrainerCut:
    """The way to compute one optimizer step over a batch. The number of micro-batches, which a trainer accumulates, follows from the rows.

    `micro_batch_rows` rows go into a forward pass, of a rank's rows the last ones into a smaller one where they do not come out even. `form`
    says whether they are padded to the longest or joined into one row. `extra_padding` positions are added to padded rows, on the side
    `padding_side`. Each of `ranks` takes a run of consecutive rows, whose numbers differ by one at most.
    """

    micro_batch_rows: int
    form: Literal["padded", "packed"] = "padded"
    extra_padding: int = 0
    padding_side: Literal["left", "right"] = "right"
    ranks: int = 1

    @property
    def name(self) -> str:
        """The cut as a person reads it: "padded, 2 rows at a time, 3 more on the left, 1 rank"."""
        parts = [self.form, f"{self.micro_batch_rows} row{'s' if self.micro_batch_rows > 1 else ''} at a time"]
        if self.extra_padding or self.padding_side == "left":
            parts.append(f"{self.extra_padding} more on the {self.padding_side}")
        parts.append("1 rank" if self.ranks == 1 else f"{self.ranks} ranks")
        return ", ".join(parts)

    def divide(self, count: int) -> Sequence[Sequence[Sequence[int]]]:
        """Return the places of rows: by rank, by micro-batch."""
        shares = np.array_split(np.arange(count), self.ranks)
        size = self.micro_batch_rows
        return [[share[start : start + size].tolist() for start in range(0, len(share), size)] for share in shares]

    def check(self, count: int) -> None:
        """Raise DataError for a cut that `count` rows cannot have."""
        if self.micro_batch_rows < 1 or self.ranks < 1 or self.extra_padding < 0:
            raise DataError(
                f"the cut {self.name} is none", remedy="Give at least one row and one rank, and no negative number of positions"
            )
        if self.ranks > count:
            raise DataError(f"the cut {self.name} has more ranks than the {count} rows", remedy="Give more rows, or fewer ranks")
        if self.form == "packed" and (self.extra_padding or self.padding_side == "left"):
            raise DataError(f"the cut {self.name} pads rows that it packs", remedy="Leave padding to cuts whose form is padded")

    def explain_departure(self, rows: Sequence[Row], forwards: Sequence[Forward]) -> str:
        """Say what `forwards`, in any order, do otherwise than this cut; "" where they follow it. They may pad more."""
        expected = sorted(self._expect(rows), key=_size)
        seen = sorted(forwards, key=_size)
        if len(seen) != len(expected):
            return f"the trainer ignored the cut: {_count(len(seen))} instead of {len(expected)}"
        for got, due in zip(seen, expected, strict=True):
            if got.rows != due.rows or got.tokens < due.tokens:
                return f"the trainer ignored the cut: a forward pass of {got.rows} x {got.tokens} tokens instead of {due.rows} x {due.tokens}"
        padding, wanted = (self._sum_padding(every) for every in (seen, expected))
        if padding is not None and wanted is not None and padding < wanted:
            return f"the trainer ignored the cut: {padding} padded positions on the {self.padding_side} instead of {wanted}"
        return ""

    def _sum_padding(self, forwards: Sequence[Forward]) -> int | None:
        """Return the padded positions on this cut's side; None where a pass does not show them."""
        own = [forward.left if self.padding_side == "left" else forward.right for forward in forwards]
        return None if self.form == "packed" or None in own else sum(filter(None, own))

    def _expect(self, rows: Sequence[Row]) -> list[Forward]:
        """Return the forward passes of this cut, with the least padding that they have on its side.

        Rollouts are padded on both sides where a trainer keeps prompts and completions in columns of their own, so only what is added counts.
        """
        columns = find_kind(rows[0]) == "rollout"
        expected = []
        for rank in self.divide(len(rows)):
            for members in rank:
                lengths = [len(sequence.input_ids) for place in members for sequence in list_sequences(rows[place])]
                if self.form == "packed":
                    expected.append(Forward(1, sum(lengths)))
                    continue
                longest = max(lengths) + self.extra_padding
                added = self.extra_padding * len(lengths)
                padding = added if columns else longest * len(lengths) - sum(lengths)
                left, right = (padding, 0) if self.padding_side == "left" else (0, padding)
                expected.append(Forward(len(lengths), longest, left, right))
        return expected


def standard_cuts(rows: Sequence[Row]) -> list[TrainerCut]:
    """Return cuts of one rank: all rows at once, 1, 2 and 3 at a time, with more padding on either side, and packed."""
    sizes = [size for size in (1, 2, 3) if size < len(rows)]
    return [
        TrainerCut(micro_batch_rows=len(rows)),
        *(TrainerCut(micro_batch_rows=size) for size in sizes),
        TrainerCut(micro_batch_rows=2, extra_padding=5),
        TrainerCut(micro_batch_rows=2, extra_padding=3, padding_side="left"),
        TrainerCut(micro_batch_rows=2, form="packed"),
        TrainerCut(micro_batch_rows=len(rows), form="packed"),
    ]


def _size(forward: Forward) -> tuple[int, int]:
    return forward.rows, forward.tokens


def _count(forwards: int) -> str:
    return f"{forwards} forward pass{'' if forwards == 1 else 'es'}"
