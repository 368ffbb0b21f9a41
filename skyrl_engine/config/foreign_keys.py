"""Words under which people know keys of this configuration from other trainers, and the key of each; `foreign_keys.toml` has them.

Reinforcement has words of its own, some of which mean something else in fine-tuning: a run by `trainer = "rl"` is asked for those first.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from attrs import frozen

RL: Final = "rl"

_OF_SFT = ("data.", "training.")
"""Tables that a run by reinforcement does not have."""


@frozen
class ForeignKeys:
    """The key and the remark of each word, and the remedy of each word without a key; words are in lower case with "_" between their parts.

    `words` and `words_of_rl` hold them by key, as they are written elsewhere.
    """

    of_any: Mapping[str, tuple[str, str]]
    of_rl: Mapping[str, tuple[str, str]]
    not_here: Mapping[str, str]
    words: Mapping[str, tuple[str, ...]]
    words_of_rl: Mapping[str, tuple[str, ...]]


@cache
def read_foreign_keys() -> ForeignKeys:
    """Read the file of the words, once a process and when the first of them is asked for."""
    tables = tomllib.loads(files(__package__).joinpath("foreign_keys.toml").read_text(encoding="utf-8"))
    return ForeignKeys(
        _index_words(tables["any"]),
        _index_words(tables["rl"]),
        {word: row["remedy"] for row in tables["not_here"] for word in row["words"]},
        _group_by_key(tables["any"]),
        _group_by_key(tables["rl"]),
    )


def _index_words(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    return {_simplify(word): (row["key"], row.get("remark", "")) for row in rows for word in row["words"]}


def _group_by_key(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    words: dict[str, tuple[str, ...]] = {}
    for row in rows:
        words[row["key"]] = (*words.get(row["key"], ()), *row["words"])
    return words


def key_for(word: str, trainer: str | None = None) -> str | None:
    """Return the key that people know by this word from other trainers; None where there is none."""
    known, plain = read_foreign_keys(), _simplify(word)
    key, _ = known.of_any.get(plain, (None, ""))
    if trainer == RL and key is not None and key.startswith(_OF_SFT):
        key = None
    of_rl, _ = known.of_rl.get(plain, (None, ""))
    return of_rl if of_rl is not None and (key is None or trainer == RL) else key


def is_known(word: str) -> bool:
    """Say whether the word is one of other trainers, also where nothing here corresponds to it."""
    return key_for(word) is not None or _simplify(word) in read_foreign_keys().not_here


def explain_word(word: str, trainer: str | None = None) -> str | None:
    """Return a sentence that names the key; None for a word that no other trainer is known to use."""
    known, plain = read_foreign_keys(), _simplify(word)
    key = key_for(plain, trainer)
    if key is None:
        return known.not_here.get(plain)
    remark = remark_of(plain, trainer)
    return f"Set {key}{f' ({remark})' if remark else ''}"


def remark_of(word: str, trainer: str | None = None) -> str:
    """Return in what the key differs from what the word means elsewhere; empty where it does not, or nobody knows the word."""
    known, plain = read_foreign_keys(), _simplify(word)
    key = key_for(word, trainer)
    of_rl, remark = known.of_rl.get(plain, (None, ""))
    return remark if of_rl == key else known.of_any.get(plain, (None, ""))[1]


def explain_path(path: Sequence[str | int], trainer: str | None = None) -> str | None:
    """Return a sentence for a key with the tables around it, which say what `n` or `interval` is: the longest end that is known counts."""
    names = [str(name) for name in path if not isinstance(name, int)]
    if trainer != RL and key_for(names[-1]) in read_foreign_keys().words:
        return explain_word(names[-1])
    sentences = (explain_word(".".join(names[start:]), trainer) for start in range(len(names)))
    return next((sentence for sentence in sentences if sentence is not None), None)


def words() -> Mapping[str, tuple[str, ...]]:
    """Return the words of every key."""
    return read_foreign_keys().words


def words_of_rl() -> Mapping[str, tuple[str, ...]]:
    """Return the words of reinforcement by key."""
    return read_foreign_keys().words_of_rl


def _simplify(word: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_")
