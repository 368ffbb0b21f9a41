"""Texts of a dialogue as token ids, also where a text follows sampled tokens; and tokens as texts."""

import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import define, field

from skyrl_engine.data.text.tokenization import encodable, leading_special_tokens
from skyrl_engine.errors import UnsupportedError

Ids = npt.NDArray[np.int32]

APPEND_REMEDY: Final = 'Set rl.history = "template", which renders every prompt anew, or model.chat_template to another template'

_TEXTS_KEPT: Final = 4096
"""Texts whose token ids are kept: the attempts at a task share their prompt, and environments often answer alike."""

_BEFORE: Final = ("0", ".", ")", "z")
"""Ends of turns after which a suffix is tokenized, until its tokens begin where it does."""

_FIRST: Final = ("\n", ":", "x", "<")
"""Beginnings of texts by which a tokenizer is known that puts a space before them."""


@define(eq=False)
class TurnTokens:
    """Tokenizes what a chat template writes.

    `name` is the template's, for messages, and `added_tokens` are those that it may write of special ones. Arrays are read-only.
    """

    tokenizer: Any
    name: str
    added_tokens: Iterable[str]
    _encoded: Any = field(init=False)
    _encoded_after_turn: Any = field(init=False)

    @_encoded.default
    def _make_cache(self) -> Any:
        return lru_cache(_TEXTS_KEPT)(self.encode_anew)

    @_encoded_after_turn.default
    def _make_cache_of_suffixes(self) -> Any:
        return lru_cache(_TEXTS_KEPT)(self._encode_after_turn)

    def encode(self, text: str, name: str) -> Ids:
        """int32[n]: the tokens of a text; `name` is the task's, for errors. Raises DataError for a text that UTF-8 cannot hold."""
        ids: Ids = self._encoded(encodable(text, name))
        return ids

    def encode_with_leading(self, text: str, name: str) -> Ids:
        """int32[n]: the tokens of a text that no template writes, after those that the tokenizer puts before one. Raises as `encode` does."""
        ids = self.encode(text, name)
        lead = leading_special_tokens(self.tokenizer)
        if len(lead) and not np.array_equal(ids[: len(lead)], lead):
            ids = np.concatenate([lead, ids])
            ids.setflags(write=False)
        return ids

    def encode_anew(self, text: str) -> Ids:
        """int32[n]: the tokens of a text that is seldom asked for, and is not kept."""
        # what special tokens there are, the template wrote
        ids = np.asarray(
            self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"], dtype=np.int32
        )
        ids.setflags(write=False)
        return ids

    def encode_after_turn(self, text: str, name: str) -> Ids:
        """int32[n]: the tokens of a text that stands after others.

        Raises UnsupportedError where they cannot be told from those before, and DataError as `encode` does.
        """
        ids: Ids = self._encoded_after_turn(encodable(text, name))
        return ids

    def _encode_after_turn(self, text: str) -> Ids:
        if not self._marks_beginnings:
            return self.encode_anew(text)
        ids = next((ids for before in _BEFORE if (ids := self.encode_behind(before, text)) is not None), None)
        if ids is None:
            raise UnsupportedError(
                f"{self.name} writes {text[:40]!r} after a turn, and its tokenizer puts a space before texts and joins that with whatever "
                "is before it",
                remedy=APPEND_REMEDY,
            )
        ids.setflags(write=False)
        return ids

    def encode_behind(self, before: str, text: str) -> Ids | None:
        """int32[n]: the tokens of `text` after those of `before`; None where a token is of both."""
        first, whole = self.encode_anew(before), self.encode_anew(before + text)
        return whole[len(first) :].copy() if np.array_equal(whole[: len(first)], first) else None

    @cached_property
    def _marks_beginnings(self) -> bool:
        """Say that the tokenizer writes a text otherwise where it begins than after another one."""
        pairs = [(self.encode_behind(before, text), self.encode_anew(text)) for before in _BEFORE for text in _FIRST]
        told = [not np.array_equal(after, alone) for after, alone in pairs if after is not None]
        return bool(told) and all(told)

    def decode(self, ids: list[int], *, without_special: bool) -> str:
        """Return the text of tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=without_special, clean_up_tokenization_spaces=False)
        return text

    def decode_with_special(self, ids: list[int]) -> str:
        """Return a turn's text with special tokens, which may mark calls, but for those at its end."""
        special = set(self.tokenizer.all_special_ids)
        length = next((place for place in range(len(ids), 0, -1) if ids[place - 1] not in special), 0)
        return self.decode(ids[:length], without_special=False)

    @cached_property
    def special(self) -> re.Pattern[str]:
        """The pattern of the special tokens in a text."""
        longest_first = sorted(map(re.escape, {*self.added_tokens} - {""}), key=len, reverse=True)
        return re.compile("|".join(longest_first) if longest_first else r"(?!)")

    def list_special_ids(self, text: str) -> list[int]:
        """Return the ids of the special tokens that a text writes."""
        ids: list[int] = [self.tokenizer.convert_tokens_to_ids(token) for token in self.special.findall(text)]
        return ids

    def find_ending(self, suffix: str) -> int | None:
        """Return the special token with which a suffix begins, white space aside."""
        match = self.special.match(suffix, len(suffix) - len(suffix.lstrip()))
        return None if match is None else int(self.tokenizer.convert_tokens_to_ids(match.group()))
