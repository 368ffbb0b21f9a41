"""The end of a row by the contract, found in tokens that were sampled without a stop."""

from collections.abc import Collection, Sequence

from attrs import frozen

from skyrl_engine.model_facts.tokenizer import Decode


@frozen
class Stop:
    """The end of a row after `count` tokens, and the token or string that stopped it."""

    count: int
    stop: int | str


def find_stop(
    tokens: Sequence[int], ends: Collection[int], strings: Sequence[str], least: int, decode: Decode | None
) -> Stop | None:
    """Return the first place, from `least` tokens on, whose token is an end or completes a string; None where there is none."""
    before = ""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count]) if decode is not None and strings else ""
        if count >= least:
            if tokens[count - 1] in ends:
                return Stop(count, tokens[count - 1])
            completed = [(text.rindex(string), string) for string in strings if text.count(string) > before.count(string)]
            if completed:
                return Stop(count, min(completed)[1])
        before = text
    return None
