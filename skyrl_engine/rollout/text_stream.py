"""Text of tokens that come one by one: what is certain is shown, what later tokens may change waits."""

from collections.abc import Sequence
from typing import Final

from attrs import define, field

from skyrl_engine.model_facts.tokenizer import Decode

_INCOMPLETE: Final = "\ufffd"
"""Stands for bytes of a character whose other bytes are in tokens to come."""


@define
class TextStream:
    """Decodes growing token ids. The pieces add up to the text of all tokens, decoded together.

    A token's text may depend on the one before it (a space that SentencePiece leaves out at the beginning), so new tokens are decoded after
    those of the last piece, whose text is then taken off. This is the rule of vLLM's `detokenize_incrementally`.
    """

    decode: Decode
    _start: int = field(default=0, init=False)
    """The first token of the last piece."""
    _end: int = field(default=0, init=False)
    """The first token of which nothing is shown."""

    def extend(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that is new in all token ids so far; `last` says that none follow, so that nothing waits."""
        before, now = self.decode(ids[self._start : self._end]), self.decode(ids[self._start :])
        if (now.endswith(_INCOMPLETE) and not last) or len(now) <= len(before):
            return ""
        self._start, self._end = self._end, len(ids)
        return now[len(before) :]
