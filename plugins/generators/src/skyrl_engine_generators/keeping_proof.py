"""Prove at the start what may be kept of a row for its next turn: that which reading it again would give, to the last bit on a CPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine_generators.rows import CachedDecoder, Ids
from skyrl_engine_generators.slots import KeptPiece

LENGTH, STARTS = 150, (45, 61, 140)
"""A row of so many tokens is read from these places on: within a piece and a block of attention, and across both."""

STEPS, FIRST_STEPS = 12, (96, 108, 120)
"""So many tokens are sampled after so many others: at every place of a piece, and across two blocks of attention."""

TOLERANCE, TOLERANCE_BFLOAT16 = 1e-3, 0.05
"""Largest and mean distance in nats, elsewhere than on a CPU."""


@frozen
class Keeping:
    """Says whether parts of rows may be kept, and tokens as they were sampled; `reason`, a clause, why not even what was read may be."""

    keeps: bool
    keeps_sampled: bool
    reason: str | None = None


@torch.inference_mode()
def prove_keeping(model: Any, limit: int | None) -> Keeping:
    """Compare rows that are read in parts, and in steps, with rows that are read whole."""
    rows = CachedDecoder(model, len(FIRST_STEPS))
    try:
        if not rows.keeps:
            return Keeping(False, False, "its attention may tell which tokens are read together")
        return _compare(rows, min(LENGTH, LENGTH if limit is None else limit))
    except Exception as error:  # noqa: BLE001 - model code that is not made for it may fail in any way
        return Keeping(False, False, f"reading a part of it fails with {type(error).__name__}")
    finally:
        rows.invariance.undo()


def _compare(rows: CachedDecoder, length: int) -> Keeping:
    draw = np.random.default_rng(1)
    row, other = draw.integers(0, rows.vocabulary, (2, length))
    due = rows.read([0], [row], [0])[0]
    due_states = _list_states(rows, 0, length)
    got = torch.cat(list(_read_in_parts(rows, row, other)))
    if rows.device.type != "cpu":
        apart = (rows.logits(got).float().log_softmax(-1) - rows.logits(due).float().log_softmax(-1)).abs()
        low = rows.logits(due).dtype == torch.bfloat16
        gap, bound = (float(apart.mean()), TOLERANCE_BFLOAT16) if low else (float(apart.max()), TOLERANCE)
        return Keeping(True, True) if gap <= bound else Keeping(False, False, f"parts that are read apart are {gap:.2g} nats off")
    if not torch.equal(got, due) or not _are_equal(_list_states(rows, 1, length), due_states):
        return Keeping(False, False, "parts that are read apart differ in the last bits")
    return Keeping(True, length == LENGTH and _are_sampled_alike(rows, row, due, due_states))


def _read_in_parts(rows: CachedDecoder, row: Ids, other: Ids) -> Iterator[Tensor]:
    """Read a row in parts, from what was kept of those before, beside a row that begins elsewhere."""
    starts = [0, *(start for start in STARTS if start < len(row))]
    kept: list[KeptPiece] = []
    for start, end in zip(starts, [*starts[1:], len(row)], strict=True):
        if kept:
            rows.restore(1, kept, start)
        yield rows.read([1, 2], [row[:end], other], [start, 0])[0]
        kept.append(rows.save(1, start, end))


def _are_sampled_alike(rows: CachedDecoder, row: Ids, due: Tensor, due_states: list[Tensor]) -> bool:
    """Say whether tokens that are read one by one leave the keys and values that reading them together leaves."""
    for slot, first in enumerate(FIRST_STEPS):
        rows.read([slot], [row[:first]], [0])
    for number in range(STEPS):
        at = [first + number for first in FIRST_STEPS]
        hidden = rows.step([int(row[place]) for place in at], at)
        if not torch.equal(hidden, due[at]):
            return False
    ends = [first + STEPS for first in FIRST_STEPS]
    return all(
        _are_equal(_list_states(rows, slot, end), [states[:, :end] for states in due_states]) for slot, end in enumerate(ends)
    )


def _list_states(rows: CachedDecoder, slot: int, length: int) -> list[Tensor]:
    return [states for layer in rows.save(slot, 0, length).states for states in layer]


def _are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
