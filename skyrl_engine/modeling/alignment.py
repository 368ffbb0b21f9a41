"""Align the tokens of two tokenizers by the text that they make.

A *boundary* is a place in the text, counted in characters, at which a token ends and nothing of a character is missing. Between two boundaries
that both tokenizers have, some tokens of the one stand for the same text as some tokens of the other: a group.

    text       The  cat  sat
    student    The| cat| s|at|          groups: The / The     cat / c at     s at / sat
    teacher    The| c|at| sat|
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.ragged import IntArray

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Text that tokenizers decode a part of a character to."""


@frozen
class TextPiece:
    """A stretch of text and the tokens that it stands for: ordinary text, or one token that is written as a name, such as `<|im_end|>`."""

    text: str
    ids: tuple[int, ...]
    is_named: bool


@frozen
class TokenGroup:
    """Half-open ranges of tokens of a student and of a teacher that stand for the same text; neither is empty."""

    student: tuple[int, int]
    teacher: tuple[int, int]


@frozen
class TextTokenizer:
    """A tokenizer as alignment needs it: its named tokens by id, the one that `end`s a text, those that begin one, and the one for what
    it cannot write; None where it has none.
    """

    tokenizer: Any
    named: Mapping[int, str]
    end: int | None
    begins: tuple[int, ...]
    unknown: int | None

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Read a tokenizer of transformers."""
        named = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        named |= dict(zip(map(int, tokenizer.all_special_ids), map(str, tokenizer.all_special_tokens), strict=True))
        bos = tokenizer.bos_token_id
        begins = (int(bos),) if bos is not None and tokenizer("").input_ids[:1] == [bos] else ()
        end, unknown = (None if number is None else int(number) for number in (tokenizer.eos_token_id, tokenizer.unk_token_id))
        # some name the end of a text as what they cannot write
        return cls(tokenizer, named, end, begins, None if unknown == end else unknown)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, as it stands."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def cut(self, ids: Sequence[int]) -> list[TextPiece]:
        """Cut tokens into pieces of text and named tokens."""
        pieces: list[TextPiece] = []
        run: list[int] = []
        for number in [*ids, None]:
            if number is not None and number not in self.named:
                run.append(number)
                continue
            if run:
                pieces.append(TextPiece(self.decode(run), tuple(run), is_named=False))
                run = []
            if number is not None:
                pieces.append(TextPiece(self.named[number], (number,), is_named=True))
        return pieces

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and where in it each ends; -1 where that is no boundary."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        following = [start for start, _ in spans[1:]] + [len(text)]
        # tokens that share a character name the whole of it
        return list(encoded["input_ids"]), [end if after >= end else -1 for (_, end), after in zip(spans, following, strict=True)]

    def find_ends(self, piece: TextPiece) -> list[int]:
        """Return where in the text of a piece each of its tokens ends; -1 where that is no boundary."""
        if piece.is_named:
            return [len(piece.text)]
        ids, ends = self.encode(piece.text)
        if tuple(ids) == piece.ids:
            return ends
        # a sampler wrote the text in other tokens than the tokenizer would
        befores = [self.decode(piece.ids[: count + 1]) for count in range(len(piece.ids))]
        return [len(text) if piece.text.startswith(text) and not text.endswith(_UNFINISHED) else -1 for text in befores]


def translate(ids: Sequence[int], student: TextTokenizer, teacher: TextTokenizer) -> tuple[list[int], list[TokenGroup]]:
    """Return the teacher's tokens of a student's text, and the groups in which both stand for the same text, in their order.

    A named token of the student is the teacher's of the same name, and the one that ends a text the teacher's own end; another name is text to
    the teacher. Tokens that begin a text for the teacher come first. Text that one of the two cannot write, such as half a character or what
    the teacher has no token for, is of no group.
    """
    others: list[int] = list(teacher.begins)
    ours, theirs = {0: 0}, {0: len(others)}
    by_name = {name: number for number, name in teacher.named.items()}
    place = count = 0
    pieces = student.cut(ids)
    for piece in pieces:
        number = _find_token_by_name(piece, by_name, student.end, teacher.end)
        encoded, ends = ([number], [len(piece.text)]) if number is not None else teacher.encode(piece.text)
        _add(ours, student.find_ends(piece), place, count)
        _add(theirs, ends, place, len(others))
        place, count = place + len(piece.text), count + len(piece.ids)
        others += encoded
    common = sorted(ours.keys() & theirs.keys())
    text = "".join(piece.text for piece in pieces)
    groups = [
        TokenGroup((ours[start], ours[end]), (theirs[start], theirs[end]))
        for start, end in pairwise(common)
        if _UNFINISHED not in text[start:end]
    ]
    return others, [group for group in groups if _is_whole(group, others, teacher.unknown)]


def _is_whole(group: TokenGroup, others: Sequence[int], unknown: int | None) -> bool:
    """Say whether both sides have tokens, and the teacher's say the text."""
    (start, end), (first, after) = group.student, group.teacher
    return start < end and first < after and unknown not in others[first:after]


def _find_token_by_name(piece: TextPiece, by_name: Mapping[str, int], end: int | None, other_end: int | None) -> int | None:
    if not piece.is_named:
        return None
    if piece.ids[0] == end and other_end is not None:
        return other_end
    return by_name.get(piece.text)


def _add(boundaries: dict[int, int], ends: Sequence[int], place: int, count: int) -> None:
    """Add the boundaries of a piece that begins at `place`, after `count` tokens: by the place of each, the tokens up to it."""
    for number, end in enumerate(ends):
        if end >= 0:
            boundaries[place + end] = count + number + 1


def match_vocabularies(student: Mapping[str, int], teacher: Mapping[str, int]) -> tuple[IntArray, IntArray]:
    """int64[m] twice: the ids of equally written tokens in the student's and the teacher's vocabulary, in the order of the teacher's ids."""
    pairs = sorted((number, student[token]) for token, number in teacher.items() if token in student)
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 1].copy(), both[:, 0].copy()
