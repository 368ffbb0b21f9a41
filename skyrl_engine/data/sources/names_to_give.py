"""The names of columns to give, by `data.map`, for rows that no format describes: what an error proposes."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from skyrl_engine.near_words import find_near_word

KEY: Final = "data.map"
"""The table that the names are keys of."""

_KNOWN: Final[tuple[tuple[tuple[str, ...], Mapping[str, str]], ...]] = (
    # axolotl's explainchoice and concisechoice train on either; creative_acr's rows hold a draft, what is wrong with it, and what became of it
    (("question", "choices", "solution"), {"prompt": "question", "completion": "solution"}),
    (("question", "choices", "explanation"), {"prompt": "question", "completion": "explanation"}),
    (("instruction", "revision"), {"output": "revision"}),
    (("instruction", "answer"), {"output": "answer"}),
)
"""Columns of rows that can be read in more than one way, and names for the likeliest one."""


def propose_names(values: Mapping[str, Any], wanted: Collection[str]) -> dict[str, str]:
    """Return names for the row's columns, ours to its own, with which a format may describe it; none where nothing suggests itself.

    `wanted` are the columns that would help.
    """
    for columns, names in _KNOWN:
        if all(column in values for column in columns) and all(ours in wanted for ours in names):
            return dict(names)
    if misspelt := _find_misspelt(values, wanted):
        return misspelt
    chats = [column for column, value in values.items() if _is_chat(value)]
    if len(chats) == 1 and "messages" in wanted:
        return {"messages": chats[0]}
    texts = [column for column, value in values.items() if isinstance(value, str) and value.strip()]
    if len(texts) == 2 and {"prompt", "completion"} <= set(wanted):
        return dict(zip(("prompt", "completion"), texts, strict=True))
    return {}


def as_keys(names: Mapping[str, str]) -> str:
    """Return names as they are given on a command line: `data.map.prompt=question data.map.completion=answer`."""
    return " ".join(f"{KEY}.{ours}={theirs}" for ours, theirs in names.items())


def _find_misspelt(values: Mapping[str, Any], wanted: Collection[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for column in values:
        near = find_near_word(column.lower(), [name for name in wanted if name not in names], cutoff=0.7)
        if near is not None and column not in wanted:
            names[near] = column
    return names


def _is_chat(value: Any) -> bool:
    """Return True for a list of messages, whoever named its parts."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(message, Mapping) and any(name in message for name in ("role", "from")) for message in value)
    )
