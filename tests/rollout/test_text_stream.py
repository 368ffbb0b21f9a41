"""Pieces of text add up to the text of all tokens, whichever tokens come and however many at a time; no half character is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from skyrl_engine.rollout.text_stream import TextStream

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> Tokenizer:
    """Return a tokenizer with a token for every byte."""
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer whose first token loses the space before it."""
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "ü": 3}, unk_token="c"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, metaspace])
@given(data=st.data())
def test_pieces_add_up(make: type, data: st.DataObject) -> None:
    tokenizer: Tokenizer = make()
    if make is byte_level:
        ids = tokenizer.encode(data.draw(st.text(max_size=12))).ids + data.draw(st.lists(st.integers(0, 255), max_size=3))
    else:
        ids = data.draw(st.lists(st.integers(0, 3), max_size=12))
    stream, at, pieces = TextStream(lambda tokens: tokenizer.decode(list(tokens))), 0, []
    while at < len(ids):
        at = min(len(ids), at + data.draw(st.integers(1, 3)))
        pieces.append(stream.extend(ids[:at], last=at == len(ids)))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
