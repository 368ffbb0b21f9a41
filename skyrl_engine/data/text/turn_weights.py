"""Read what a message itself says about its loss: `weight` (OpenAI's format), or a boolean under one of the names that other trainers use."""

import math
from collections.abc import Mapping
from typing import Any

from skyrl_engine.data.sources.rows import Row
from skyrl_engine.errors import DataError

WEIGHT = "weight"
SWITCHES = ("train", "training", "loss")
_PARTS = ("train_detail", "training_detail")
"""Keys that weigh parts of a message, which is not supported."""


def pop_turn_weight(row: Row, column: str, number: int, message: dict[str, Any]) -> float | None:
    """Remove the keys that say if a message carries loss, and return its weight, 0 for no loss; None where they say nothing.

    Raises DataError for a value that none of them takes, for keys that contradict each other, and for loss on another role's message.
    """
    where = f"message {number}"
    for key in _PARTS:
        if message.pop(key, None):
            raise row.wrong(
                column, f"{where} has {key!r}, and loss cannot fall on a part of a message", "Split the message, or remove the key"
            )
    marks: dict[str, bool] = {}
    weight = _weight(row, column, where, message.pop(WEIGHT, None))
    if weight is not None:
        marks[WEIGHT] = bool(weight)
    for key in SWITCHES:
        if (value := message.pop(key, None)) is not None:
            if not isinstance(value, bool):
                raise row.wrong(column, f"{where} has {key} {value!r}", f"Use true or false for {key!r}")
            marks[key] = value
    if len(set(marks.values())) > 1:
        raise row.wrong(column, f"{where} contradicts itself: {_format_keys(marks, weight)}", "Keep one of these keys")
    if not marks:
        return None
    carries = next(iter(marks.values()))
    if carries and message["role"] != "assistant":
        raise row.wrong(
            column,
            f"{where} of role {message['role']!r} asks for loss ({_format_keys(marks, weight)}), and loss falls on assistant messages alone",
            "Remove the key, or give the message the role assistant",
        )
    return float(carries) if weight is None else weight


def in_prompt(row: Row, number: int) -> DataError:
    """Return the error for a message of a prompt that asks for loss."""
    return row.wrong(
        "prompt", f"message {number} asks for loss, and a prompt carries none", "Store the whole conversation in a column messages"
    )


def _weight(row: Row, column: str, where: str, weight: object) -> float | None:
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise row.wrong(
            column, f"{where} has weight {weight!r}", "Use 0 for no loss, 1 for an ordinary message, or another number above 0"
        )
    return float(weight)


def _format_keys(marks: Mapping[str, bool], weight: float | None) -> str:
    return ", ".join(f"{key} {weight:g}" if key == WEIGHT else f"{key} {str(value).lower()}" for key, value in marks.items())
