"""Keys and values of requests in slots of fixed places: a cache that transformers' layers write to and read from.

Rows are aligned to the left and have write positions of their own. Live rows are the first ones, so that a step reads them without a copy.

Positions after a row's tokens hold zeros, whatever stood there before: attention multiplies what is masked by 0, and a row that failed may have
left what is no number.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 64
"""Capacity grows to multiples of so many tokens, and by half at least, so that growing costs little in all."""


@frozen(eq=False)
class KeptPiece:
    """Keys and values of consecutive tokens of a row: per layer [heads, tokens, width] each."""

    states: tuple[tuple[Tensor, Tensor], ...]
    tokens: int

    def cut(self, tokens: int) -> "KeptPiece":
        """Return the first tokens, in memory of their own."""
        return KeptPiece(tuple((keys[:, :tokens].clone(), values[:, :tokens].clone()) for keys, values in self.states), tokens)


class Memory(Protocol):
    """The memory that rows may take."""

    def fits(self, tokens: int) -> bool:
        """Say whether there may be room for so many tokens without anything else giving way."""

    def grow(self, tokens: int) -> None:
        """Note that there is to be room for so many tokens; others give way."""


class Unlimited:
    """`Memory` that nobody shares."""

    def fits(self, tokens: int) -> bool:  # noqa: ARG002 - any number fits
        return True

    def grow(self, tokens: int) -> None:
        """Do nothing."""


class Slots(Cache):  # type: ignore[misc] # transformers is not typed
    """Room for up to `slots` rows of keys and values, [rows, heads, capacity, width] per layer, made in `memory` as they need it."""

    def __init__(self, slots: int, memory: Memory | None = None) -> None:
        super().__init__(layers=[])
        self._slots, self._memory = slots, memory or Unlimited()
        self.count = 0
        self.capacity = 0
        # where the present forward pass writes: the new tokens of prompts from `starts` on into `rows`, or one token per live row at `at`
        self.rows: list[int] | None = None
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.at: Tensor | None = None
        self.end = 0
        # the ends of what stood in the slots that a prompt is read into
        self.stale: list[int] = []
        # new tokens stand in one line, row after row, and not in rows of their own
        self.line = False
        # a prompt attends to what stands in its slot, not to the pass's own keys alone
        self.stored = False
        # so many places of each slot hold something
        self._held: list[int] = []

    @property
    def tokens(self) -> int:
        """Count the tokens that there is room for."""
        return self.count * self.capacity

    def free(self) -> None:
        """Give the memory back, and what rows hold with it."""
        self.layers.clear()
        self._held.clear()
        self.count = self.capacity = 0
        self._memory.grow(0)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self))
        layer: SlotLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def begin_read(self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], end: int, *, line: bool) -> None:
        """Let the next forward pass write so many tokens into these slots, from `starts` on, all before `end`.

        Before `starts` the slots hold the rows' tokens. `line` says that the new tokens stand in one line, row after row.
        """
        self.reserve(max(rows) + 1, end)
        self.rows, self.starts, self.lengths, self.at, self.end = list(rows), list(starts), list(lengths), None, end
        self.line, self.stored = line, line or any(starts)
        self.stale = [self._held[row] for row in rows]
        for row, start, length in zip(rows, starts, lengths, strict=True):
            self._held[row] = start + length

    def begin_step(self, at: Sequence[int], end: int, device: torch.device) -> Tensor:
        """Let the next forward pass write one token into each of the first slots, at the places `at`, all before `end`; `at` int64[n]."""
        self.reserve(len(at), end)
        at_N = torch.tensor(at, device=device)
        self.rows, self.at, self.end = None, at_N, end
        for row, place in enumerate(at):
            self._held[row] = max(self._held[row], place + 1)
        return at_N

    def reserve(self, count: int, width: int) -> None:
        """Make room for so many rows, of so many places each: for some more where memory allows it, else for these alone."""
        if count <= self.count and width <= self.capacity:
            return
        rows, places = max(count, self.count), max(width, self.capacity)
        ample = min(self._slots, self.count + self.count // 2) if count > self.count else 0
        wide = self.capacity + self.capacity // 2 if width > self.capacity else 0
        wishes = (max(rows, ample), max(places, wide)), (rows, places), (count, width)
        sizes = [(rows, _round_up(places)) for rows, places in wishes]
        self._resize(*next((size for size in sizes if self._memory.fits(size[0] * size[1])), sizes[-1]))

    def shrink(self, count: int, width: int) -> None:
        """Free what so many rows, of so many places each, do not need."""
        if not count:
            self.free()
        elif count < self.count or _round_up(width) < self.capacity:
            self._resize(min(count, self.count), min(_round_up(width), self.capacity))

    def _resize(self, count: int, capacity: int) -> None:
        self._memory.grow(count * capacity)
        self._held = [min(held, capacity) for held in self._held[:count]] + [0] * (count - self.count)
        self.count, self.capacity = count, capacity
        for layer in self.layers:
            layer.resize()

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of a row to others."""
        self.reserve(max([source, *targets]) + 1, self.capacity)
        for layer in self.layers:
            for stored in (layer.keys, layer.values):
                for target in targets:
                    stored[target, :, :length] = stored[source, :, :length]
                    stored[target, :, length : self._held[target]] = 0
        for target in targets:
            self._held[target] = length

    def save(self, row: int, start: int, end: int) -> KeptPiece:
        """Return a copy of what a row holds from `start` to `end`."""
        states = [(layer.keys[row, :, start:end].clone(), layer.values[row, :, start:end].clone()) for layer in self.layers]
        return KeptPiece(tuple(states), end - start)

    def restore(self, row: int, pieces: Sequence[KeptPiece], length: int) -> None:
        """Put the first `length` tokens of what was saved back into a row, from its first place on."""
        self.reserve(row + 1, length)
        for number in range(len(pieces[0].states)):
            while len(self.layers) <= number:
                self.layers.append(SlotLayer(self))
            self.layers[number].restore(row, [piece.states[number] for piece in pieces], length, self._held[row])
        self._held[row] = length


def _round_up(width: int) -> int:
    return -(-width // GROWTH) * GROWTH


class SlotLayer(CacheLayerMixin):  # type: ignore[misc] # transformers is not typed
    """The keys and values of one layer."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def _room(self, like: Tensor) -> Tensor:
        # zeros: what is masked is multiplied by 0, and memory that was never written may hold NaN
        return like.new_zeros((self._slots.count, like.shape[-3], self._slots.capacity, like.shape[-1]))

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._slots
        if slots.rows is not None:
            for stored, states in ((self.keys, key_states), (self.values, value_states)):
                self._write_prompts(stored, states, slots.rows)
            if not slots.stored:
                return key_states, value_states
            first, rows = slots.rows[0], slots.rows
            # rows next to one another are read where they stand
            chosen = slice(first, first + len(rows)) if rows == list(range(first, first + len(rows))) else rows
            return self.keys[chosen, :, : slots.end], self.values[chosen, :, : slots.end]
        assert slots.at is not None
        count = len(slots.at)
        live = torch.arange(count, device=key_states.device)
        self.keys[live, :, slots.at] = key_states[:count, :, 0]
        self.values[live, :, slots.at] = value_states[:count, :, 0]
        return self.keys[:count, :, : slots.end], self.values[:count, :, : slots.end]

    def _write_prompts(self, stored: Tensor, states: Tensor, rows: Sequence[int]) -> None:
        slots, offset = self._slots, 0
        for place, (row, start, length, stale) in enumerate(zip(rows, slots.starts, slots.lengths, slots.stale, strict=True)):
            stored[row, :, start : start + length] = (
                states[0, :, offset : offset + length] if slots.line else states[place, :, :length]
            )
            offset += length
            if stale > start + length:
                stored[row, :, start + length : stale] = 0

    def restore(self, row: int, pieces: Sequence[tuple[Tensor, Tensor]], length: int, held: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(*pieces[0])
        for number, stored in enumerate((self.keys, self.values)):
            at = 0
            for piece in pieces:
                part = piece[number][:, : length - at]
                stored[row, :, at : at + part.shape[1]] = part
                at += part.shape[1]
            if held > length:
                stored[row, :, length:held] = 0

    def resize(self) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._room(old)
            count, width = min(len(old), len(new)), min(old.shape[2], new.shape[2])
            new[:count, :, :width] = old[:count, :, :width]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._slots.rows is not None and not self._slots.stored else self._slots.end), 0

    def get_seq_length(self) -> int:
        if self._slots.rows is None:
            return self._slots.end - 1
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
    """The name of it in transformers below 5.13."""
