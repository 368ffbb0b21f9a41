"""The rules by which a request ends: tokens, strings, the number of tokens."""

from collections.abc import Callable, Sequence

from attrs import frozen

from skyrl_engine.contracts import FinishReason, Sampling
from skyrl_engine.model_facts.tokenizer import Decode

BYTES_PER_CHARACTER = 4
"""The longest character in UTF-8: a token of a byte-level vocabulary is a byte at least."""


@frozen(eq=False)
class StopRule:
    """The end of one request: `tokens` that stop it, and strings in the text of what was sampled."""

    tokens: frozenset[int]
    strings: tuple[str, ...]
    least: int
    most: int
    decode: Decode | None

    @classmethod
    def of(cls, sampling: Sampling, ends: Sequence[int], decode: Callable[[], Decode]) -> "StopRule":
        """The rule of a request; `ends` are the model's own end tokens, `decode` gives the decoder where one is needed."""
        tokens = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else ends)}
        strings = tuple(string for string in sampling.stop_strings if string)
        return cls(frozenset(tokens), strings, sampling.min_tokens, sampling.max_tokens, decode() if strings else None)

    def after(self, sampled: Sequence[int]) -> tuple[FinishReason | None, int | str | None]:
        """Say if the request ends after its last token, and which token or string stopped it."""
        if len(sampled) >= self.least:
            if sampled[-1] in self.tokens:
                return "stop", sampled[-1]
            if self.decode is not None and (string := self._find_completed_stop(sampled)) is not None:
                return "stop", string
        return ("length" if len(sampled) >= self.most else None), None

    def _find_completed_stop(self, sampled: Sequence[int]) -> str | None:
        """Return the string that the last token completes, the first of several. Decodes as many tokens as can hold the longest."""
        assert self.decode is not None
        reach = BYTES_PER_CHARACTER * max(map(len, self.strings)) + 1
        tail = sampled[-reach - 1 :]
        text, before = self.decode(tail), self.decode(tail[:-1])
        ended = [
            (text.rindex(string) + len(string), string) for string in self.strings if text.count(string) > before.count(string)
        ]
        return min(ended)[1] if ended else None
