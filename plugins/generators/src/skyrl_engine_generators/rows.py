"""Hidden states of rows that grow by a token a step: from cached keys and values, or by reading every row again.

On a CPU a row comes out the same, to the last bit, whatever other rows there are, and whether its beginning is read or was kept (see
`batch_invariance` and `reading`).
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl_engine.modeling.causal_lm import split_causal_lm
from skyrl_engine.modeling.divided_sampler import find_group, take_first
from skyrl_engine_generators.batch_invariance import BatchInvariance
from skyrl_engine_generators.buckets import BUCKET, FIXED, PLACES, find_unit, pad_rows, pad_to_bucket
from skyrl_engine_generators.masks import kinds_of_attention, make_masks
from skyrl_engine_generators.reading import READ_LAYOUT, ReadLayout, count_pieces
from skyrl_engine_generators.slots import KeptPiece, Memory, Slots

Ids = npt.NDArray[np.int64]

MASK_ELEMENTS = 2**24
"""Elements of the mask of a pass over prompts, at most: longer ones are read in several passes."""


class TokenDecoder(Protocol):
    """Rows of tokens by slot; live rows are the first ones. `vocabulary` counts the tokens that there are logits for.

    `keeps` says whether a row may go on from what was read of its beginning; where it may not, every `start` is 0. `keeps_sampled` says whether
    it may go on from sampled tokens too, which stand as if they were read.
    """

    device: torch.device
    vocabulary: int
    keeps: bool
    keeps_sampled: bool

    def reserve(self, count: int, length: int) -> None:
        """Make room for so many rows, of so many tokens each; those beyond are given up where memory is short."""

    def shrink(self, count: int, length: int) -> None:
        """Free what so many rows, of so many tokens each, do not need."""

    def read(self, slots: Sequence[int], rows: Sequence[Ids], starts: Sequence[int]) -> list[Tensor]:
        """Put whole rows into slots, which hold them up to `starts` already; the hidden states [tokens, width] of each from there on."""

    def step(self, tokens: Sequence[int], at: Sequence[int]) -> Tensor:
        """Append a token to each of the first rows, at its place `at`; hidden states [n, width] there."""

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first tokens of a row to other slots."""

    def save(self, slot: int, start: int, end: int, /) -> KeptPiece:
        """Return a copy of what a slot holds of a prompt from `start` to `end`."""

    def restore(self, slot: int, pieces: Sequence[KeptPiece], length: int, /) -> None:
        """Put the first `length` tokens of consecutive pieces into a slot."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] of hidden states [n, width]."""

    def settle(self, choice: Tensor, /) -> Tensor:
        """Return a choice that was made of logits, as the first of the ranks made it that compute the same rows."""

    def rest(self) -> None:
        """Free what no row needs: nothing is under way, and others may want the memory."""


class _Model:
    """The decoder, the head and the rule of a plain transformers model."""

    def __init__(self, model: Any) -> None:
        self._parts, self._group = split_causal_lm(model), find_group(model)
        self.invariance = BatchInvariance(model)
        self._config = model.config
        self._dtype = self._parts.head.weight.dtype
        self.device = self._parts.head.weight.device
        self.vocabulary = self._parts.head.out_features

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._parts.rule(self._parts.head(pad_rows(hidden, find_unit(hidden))))
        return logits[: len(hidden)]

    def settle(self, choice: Tensor, /) -> Tensor:
        return take_first(choice, self._group)

    def _hidden(self, **inputs: Any) -> Tensor:
        states: Tensor = self._parts.decoder(**inputs).last_hidden_state
        return states

    def _width(self, length: int) -> int:
        """Return how many places a row of so many tokens is read at."""
        return pad_to_bucket(length, self.device)

    def _pad_rows(self, rows: Sequence[Ids]) -> Tensor:
        """int64[k, longest or more] on the device, zeros after the shorter ones."""
        padded = np.zeros((len(rows), self._width(max(map(len, rows)))), dtype=np.int64)
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        return torch.from_numpy(padded).to(self.device)


def name_of_cache(decoder: torch.nn.Module) -> str:
    """Return what a decoder calls its argument of cached keys and values: `cache`, or `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


class CachedDecoder(_Model):
    """Up to `slots` rows whose keys and values are kept in `memory`: a step computes one token per row.

    Raises UnsupportedError for a model that keeps something else.
    """

    def __init__(self, model: Any, slots: int, memory: Memory | None = None) -> None:
        self._kinds = kinds_of_attention(model.config)
        super().__init__(model)
        self._cache = name_of_cache(self._parts.decoder)
        self.room = Slots(slots, memory)
        self._attends = self.invariance.attends
        # elsewhere nothing is promised to the last bit
        self.keeps = self._attends or self.device.type != "cpu"
        # on a CPU it is to be shown first
        self.keeps_sampled = self.device.type != "cpu"
        # host memory is not worth filling with zeros again at every turn of a dialogue
        self._frees = self.device.type == "cuda"

    def reserve(self, count: int, length: int) -> None:
        self.room.reserve(count, pad_to_bucket(length, self.device, PLACES))

    def shrink(self, count: int, length: int) -> None:
        self.room.shrink(count, pad_to_bucket(length, self.device, PLACES))

    def read(self, slots: Sequence[int], rows: Sequence[Ids], starts: Sequence[int]) -> list[Tensor]:
        read = self._read_line if self._attends else self._read_rows
        if self._attends and len(rows) > 1 and self.invariance.has_experts and find_unit(self._parts.head.weight) == FIXED:
            # experts have as many tokens as there are in the pass, and their number matters
            return [self.read([slots[place]], [rows[place]], [starts[place]])[0] for place in range(len(rows))]
        states: list[list[Tensor]] = [[] for _ in rows]
        whole = [(place, start, len(row)) for place, (row, start) in enumerate(zip(rows, starts, strict=True))]
        # rows that all begin here have no mask elsewhere
        for spans in _split_passes(whole) if self._attends or any(starts) else [whole]:
            hidden = read(
                [slots[place] for place, _, _ in spans],
                [rows[place][:end] for place, _, end in spans],
                [start for _, start, _ in spans],
            )
            for (place, _, _), part in zip(spans, hidden, strict=True):
                states[place].append(part)
        return [torch.cat(parts) for parts in states]

    def _read_line(self, slots: Sequence[int], rows: Sequence[Ids], starts: Sequence[int]) -> list[Tensor]:
        """Read the new tokens of all rows in one line, so that rows of any lengths fill a pass."""
        new = [len(row) - start for row, start in zip(rows, starts, strict=True)]
        order = sorted(range(len(rows)), key=lambda place: count_pieces(starts[place], new[place]), reverse=True)
        reading = ReadLayout.of([starts[place] for place in order], [new[place] for place in order])
        end = max(piece.end for piece in reading.pieces)
        self.room.begin_read([slots[place] for place in order], reading.starts, reading.lengths, end, line=True)
        filling = np.zeros(-sum(new) % find_unit(self._parts.head.weight), dtype=np.int64)
        ids = torch.from_numpy(np.concatenate([*(rows[place][starts[place] :] for place in order), filling]))[None]
        places = torch.from_numpy(np.concatenate([*(np.arange(starts[place], len(rows[place])) for place in order), filling]))[None]
        masks = make_masks(self._config, self._kinds, places, end, self._dtype)
        began = READ_LAYOUT.set(reading)
        try:
            hidden = self._hidden(input_ids=ids, position_ids=places, attention_mask=masks, **self._keeping())[0]
        finally:
            READ_LAYOUT.reset(began)
        by_place = dict(zip(order, reading.rows(), strict=True))
        return [hidden[by_place[place]] for place in range(len(rows))]

    def _read_rows(self, slots: Sequence[int], rows: Sequence[Ids], starts: Sequence[int]) -> list[Tensor]:
        """Read the new tokens of rows aligned to the left; rows that all begin here need no mask but the model's own."""
        ids = self._pad_rows([row[start:] for row, start in zip(rows, starts, strict=True)])
        lengths = [len(row) for row in rows]
        new = [length - start for length, start in zip(lengths, starts, strict=True)]
        end = max(lengths) if any(starts) else ids.shape[1]
        self.room.begin_read(slots, starts, new, end, line=False)
        # what is filled up has the last token's place: a model may have no later one
        lasts = torch.tensor(lengths, device=self.device)[:, None] - 1
        places = torch.arange(ids.shape[1], device=self.device) + torch.tensor(starts, device=self.device)[:, None]
        places = torch.minimum(places, lasts)
        masks = {"attention_mask": make_masks(self._config, self._kinds, places, end, self._dtype)} if any(starts) else {}
        hidden = self._hidden(input_ids=ids, position_ids=places, **masks, **self._keeping())
        return [states[:count] for states, count in zip(hidden, new, strict=True)]

    def step(self, tokens: Sequence[int], at: Sequence[int]) -> Tensor:
        # products get rows that fill up; they have keys and values where attention is the model's own
        filling = [0] * (-len(tokens) % find_unit(self._parts.head.weight))
        end = pad_to_bucket(max(at) + 1, self.device, PLACES)
        at_N = self.room.begin_step(at if self._attends else [*at, *filling], end, self.device)
        masks = make_masks(self._config, self._kinds, at_N[:, None], end, self._dtype)
        ids = torch.tensor([*tokens, *filling], device=self.device)[:, None]
        places = torch.tensor([*at, *filling], device=self.device)[:, None]
        hidden = self._hidden(input_ids=ids, attention_mask=masks, position_ids=places, **self._keeping())
        return hidden[: len(tokens), 0]

    def _keeping(self) -> dict[str, Any]:
        return {self._cache: self.room, "use_cache": True}

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self.room.copy(source, targets, length)

    def save(self, slot: int, start: int, end: int, /) -> KeptPiece:
        return self.room.save(slot, start, end)

    def restore(self, slot: int, pieces: Sequence[KeptPiece], length: int, /) -> None:
        self.room.restore(slot, pieces, length)

    def rest(self) -> None:
        if self._frees:
            self.room.free()


def _split_passes(spans: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Split rows (place, start, end) into passes whose masks are not too large: of each as many tokens as a pass takes, in their order."""
    longest = max(end for _, _, end in spans)
    most = max(BUCKET, MASK_ELEMENTS // longest)
    taken: list[tuple[int, int, int]] = []
    room = most
    for place, start, end in spans:
        at = start
        while at < end:
            until = min(end, at + room)
            taken.append((place, at, until))
            room -= until - at
            at = until
            if not room:
                yield taken
                taken, room = [], most
    if taken:
        yield taken


class UncachedDecoder(_Model):
    """Rows that are read from the first token on in every step: right for every causal model, and slow.

    On a CPU one by one: what else models keep, such as the states of scans, is added up in an order that the number of rows changes.
    """

    keeps = keeps_sampled = False

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model)
        self._rows: list[Ids] = [np.zeros(0, dtype=np.int64)] * slots

    def reserve(self, count: int, length: int) -> None:
        """Do nothing: ids take no memory worth a plan."""

    def shrink(self, count: int, length: int) -> None:
        """Do nothing, as `reserve` does."""

    def read(self, slots: Sequence[int], rows: Sequence[Ids], starts: Sequence[int]) -> list[Tensor]:
        assert not any(starts), "nothing is kept of rows"
        for slot, row in zip(slots, rows, strict=True):
            self._rows[slot] = np.asarray(row)
        return self._read(rows)

    def step(self, tokens: Sequence[int], at: Sequence[int]) -> Tensor:
        for slot, (token, place) in enumerate(zip(tokens, at, strict=True)):
            self._rows[slot] = np.append(self._rows[slot][:place], token)
        return torch.stack([states[-1] for states in self._read(self._rows[: len(tokens)])])

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        for target in targets:
            self._rows[target] = self._rows[source][:length]

    def save(self, _slot: int, _start: int, _end: int, /) -> KeptPiece:
        raise AssertionError("nothing is kept of rows")

    def restore(self, _slot: int, _pieces: Sequence[KeptPiece], _length: int, /) -> None:
        raise AssertionError("nothing is kept of rows")

    def rest(self) -> None:
        self._rows = [np.zeros(0, dtype=np.int64)] * len(self._rows)

    def _read(self, rows: Sequence[Ids]) -> list[Tensor]:
        passes = [[row] for row in rows] if self.device.type == "cpu" else [rows]
        return [states for together in passes for states in self._pass(together)]

    def _pass(self, rows: Sequence[Ids]) -> list[Tensor]:
        ids = self._pad_rows(rows)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
        hidden = self._hidden(input_ids=ids, attention_mask=mask.long(), use_cache=False)
        return [states[: len(row)] for states, row in zip(hidden, rows, strict=True)]
