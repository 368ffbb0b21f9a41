"""Hidden states of rows that grow by a token a step: from cached keys and values, or by reading every row again.

On a CPU a row comes out the same, to the last bit, whatever other rows there are (see `batch_invariance`).
"""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl_engine.modeling.causal_lm import split_causal_lm
from skyrl_engine_generators.batch_invariance import PLACES, BatchInvariance, pad_rows_to_bucket, pad_to_bucket
from skyrl_engine_generators.masks import kinds_of_attention, step_masks
from skyrl_engine_generators.slots import Slots

Ids = npt.NDArray[np.int64]


class TokenDecoder(Protocol):
    """Rows of tokens by slot; live rows are the first ones. `vocabulary` counts the tokens that there are logits for."""

    device: torch.device
    vocabulary: int

    def read(self, slots: Sequence[int], rows: Sequence[Ids]) -> list[Tensor]:
        """Put whole rows into slots; the hidden states [tokens, width] of each."""

    def step(self, tokens: Sequence[int], at: Sequence[int]) -> Tensor:
        """Append a token to each of the first rows, at its place `at`; hidden states [n, width] there."""

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first tokens of a row to other slots."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] of hidden states [n, width]."""

    def rest(self) -> None:
        """Free what no row needs: nothing is under way, and others may want the memory."""


class _Model:
    """The decoder, the head and the rule of a plain transformers model."""

    def __init__(self, model: Any) -> None:
        self._parts = split_causal_lm(model)
        self.invariance = BatchInvariance(model)
        self._config = model.config
        self._dtype = self._parts.head.weight.dtype
        self.device = self._parts.head.weight.device
        self.vocabulary = self._parts.head.out_features

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._parts.rule(self._parts.head(pad_rows_to_bucket(hidden)))
        return logits[: len(hidden)]

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
    """Rows whose keys and values are kept: a step computes one token per row.

    Raises UnsupportedError for a model that keeps something else.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self._kinds = kinds_of_attention(model.config)
        super().__init__(model)
        self._cache = name_of_cache(self._parts.decoder)
        self._slots = Slots(pad_to_bucket(slots, self.device))
        # host memory is not worth filling with zeros again at every turn of a dialogue
        self._frees = self.device.type == "cuda"

    def read(self, slots: Sequence[int], rows: Sequence[Ids]) -> list[Tensor]:
        alike: dict[int, list[int]] = {}
        longest = max(map(len, rows))
        for place, row in enumerate(rows):
            # on a CPU a longer row in the same pass would change the order in which this one is added up
            alike.setdefault(self._width(len(row) if self.device.type == "cpu" else longest), []).append(place)
        hidden_by_index: dict[int, Tensor] = {}
        for places in alike.values():
            hidden = self._read([slots[place] for place in places], [rows[place] for place in places])
            hidden_by_index |= {index: states[: len(rows[index])] for index, states in zip(places, hidden, strict=True)}
        return [hidden_by_index[index] for index in range(len(rows))]

    def _read(self, slots: Sequence[int], rows: Sequence[Ids]) -> Tensor:
        """Read rows of one width: [k, width or more, hidden]."""
        ids = self._pad_rows(rows)
        self._slots.begin_prompts(slots, [len(row) for row in rows], ids.shape[1], self.device)
        # what is filled up has the last token's place: a model may have no later one
        last = max(map(len, rows)) - 1
        places = torch.arange(ids.shape[1], device=self.device).clamp(max=last)[None].expand(len(rows), -1)
        # rows are aligned to the left, so the model's own causal mask keeps their tokens from what is padded after them
        return self._hidden(input_ids=ids, position_ids=places, **self._keeping())

    def step(self, tokens: Sequence[int], at: Sequence[int]) -> Tensor:
        # rows that fill up write to slots that are free
        free = [0] * (pad_to_bucket(len(tokens), self.device) - len(tokens))
        end = pad_to_bucket(max(at) + 1, self.device, PLACES)
        at_N = self._slots.begin_step([*at, *free], end, self.device)
        masks = step_masks(self._config, self._kinds, at_N, end, self._dtype)
        ids = torch.tensor([*tokens, *free], device=self.device)[:, None]
        hidden = self._hidden(input_ids=ids, attention_mask=masks, position_ids=at_N[:, None], **self._keeping())
        return hidden[: len(tokens), 0]

    def _keeping(self) -> dict[str, Any]:
        return {self._cache: self._slots, "use_cache": True}

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self._slots.copy(source, targets, length)

    def rest(self) -> None:
        if self._frees:
            self._slots = Slots(self._slots.count)


class UncachedDecoder(_Model):
    """Rows that are read from the first token on in every step: right for every causal model, and slow.

    On a CPU one by one: what else models keep, such as the states of scans, is added up in an order that the number of rows changes.
    """

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model)
        self._rows: list[Ids] = [np.zeros(0, dtype=np.int64)] * slots

    def read(self, slots: Sequence[int], rows: Sequence[Ids]) -> list[Tensor]:
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
