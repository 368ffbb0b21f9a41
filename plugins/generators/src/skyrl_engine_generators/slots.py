"""Keys and values of requests in slots of fixed places: a cache that transformers' layers write to and read from.

Rows are aligned to the left and have write positions of their own. Live rows are the first ones, so that a step reads them without a copy.

Positions after a row's tokens hold zeros, whatever stood there before: attention multiplies what is masked by 0, and a row that failed may have
left what is no number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 64
"""Capacity grows to multiples of so many tokens, and by half at least, so that growing costs little in all."""


class Slots(Cache):  # type: ignore[misc] # transformers is not typed
    """Room for `count` rows of keys and values [count, heads, capacity, width] per layer, made when a layer first writes."""

    def __init__(self, count: int) -> None:
        super().__init__(layers=[])
        self.count = count
        self.capacity = 0
        self.live = 0
        # where the present forward pass writes: whole prompts into `rows`, or one token per live row at `at`
        self.rows: Tensor | None = None
        self.at: Tensor | None = None
        self.end = 0
        # in a prefill: positions after each row's tokens, [rows, 1, width, 1], and the end of what stood in its slots before
        self.padding: Tensor | None = None
        self.stale = 0
        # so many places of each slot hold something
        self._held = [0] * count

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self))
        layer: SlotLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def begin_prompts(self, rows: Sequence[int], lengths: Sequence[int], width: int, device: torch.device) -> None:
        """Let the next forward pass write whole prompts of these lengths, read at `width` places, into these slots."""
        self.reserve(width)
        self.rows, self.at, self.end = torch.tensor(rows, device=device), None, width
        lengths_N = torch.tensor(lengths, device=device)
        self.padding = (
            (torch.arange(width, device=device) >= lengths_N[:, None])[:, None, :, None] if min(lengths) < width else None
        )
        self.stale = max(self._held[row] for row in rows)
        for row, length in zip(rows, lengths, strict=True):
            self._held[row] = length

    def begin_step(self, at: Sequence[int], end: int, device: torch.device) -> Tensor:
        """Let the next forward pass write one token into each of the first slots, at the places `at`, all before `end`; `at` int64[n]."""
        self.reserve(end)
        at_N = torch.tensor(at, device=device)
        self.rows, self.at, self.end = None, at_N, end
        for row, place in enumerate(at):
            self._held[row] = max(self._held[row], place + 1)
        return at_N

    def reserve(self, width: int) -> None:
        if width > self.capacity:
            wanted = max(width, self.capacity + self.capacity // 2)
            self.capacity = -(-wanted // GROWTH) * GROWTH
            for layer in self.layers:
                layer.grow()

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of a row to others."""
        for layer in self.layers:
            for stored in (layer.keys, layer.values):
                for target in targets:
                    stored[target, :, :length] = stored[source, :, :length]
                    stored[target, :, length : self._held[target]] = 0
        for target in targets:
            self._held[target] = length


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
        return like.new_zeros((self._slots.count, like.shape[1], self._slots.capacity, like.shape[3]))

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._slots
        if slots.rows is not None:
            for stored, states in ((self.keys, key_states), (self.values, value_states)):
                stored[slots.rows, :, : slots.end] = states if slots.padding is None else states.masked_fill(slots.padding, 0)
                stored[slots.rows, :, slots.end : slots.stale] = 0
            return key_states, value_states
        assert slots.at is not None
        live = torch.arange(len(slots.at), device=key_states.device)
        self.keys[live, :, slots.at] = key_states[:, :, 0]
        self.values[live, :, slots.at] = value_states[:, :, 0]
        return self.keys[: len(live), :, : slots.end], self.values[: len(live), :, : slots.end]

    def grow(self) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._room(old)
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._slots.rows is not None else self._slots.end), 0

    def get_seq_length(self) -> int:
        return 0 if self._slots.rows is not None else self._slots.end - 1

    def get_max_length(self) -> int:
        return -1
