"""Rows that a trainer gets in a proof, of three kinds, which their fields tell apart. Each row is one sequence of tokens or two.

- supervised: `input_ids` and `labels`, -100 where a token is not trained.
- preference: `prompt_ids`, `chosen_ids` and `rejected_ids`: two sequences, of which the answers are trained.
- rollout: `prompt_ids`, `completion_ids` and `reward`: the completion is trained, and rows of one prompt are a group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.errors import DataError

Row = Mapping[str, Any]
"""The fields of its kind, and whatever else the trainer reads."""

UNTRAINED = -100
"""The label of a token that is not trained."""

KINDS: Mapping[str, Sequence[str]] = {
    "supervised": ("input_ids", "labels"),
    "preference": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "rollout": ("prompt_ids", "completion_ids", "reward"),
}

ANSWERS: Mapping[str, Sequence[str]] = {"preference": ("chosen_ids", "rejected_ids"), "rollout": ("completion_ids",)}
"""The fields that follow the prompt, each in a sequence of its own."""


@frozen(eq=False)
class TrainedSequence:
    """`input_ids` int64[T]; `trained` bool[T - 1] says which tokens after the first are trained. Nothing predicts the first."""

    input_ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]


def find_kind(row: Row) -> str:
    """Return the kind whose fields a row has. Raises DataError where it has those of none."""
    for kind, fields in KINDS.items():
        if all(field in row for field in fields):
            return kind
    raise DataError(
        f"a row of a proof has the fields {', '.join(sorted(row)) or 'of nothing'}, which are no kind of rows",
        remedy=f"Give {'; or '.join(', '.join(fields) for fields in KINDS.values())}",
    )


def list_sequences(row: Row) -> list[TrainedSequence]:
    """Return the sequences of a row: of a preference the chosen answer's, then the rejected one's."""
    kind = find_kind(row)
    if kind == "supervised":
        return [TrainedSequence(np.asarray(row["input_ids"], np.int64), np.asarray(row["labels"])[1:] != UNTRAINED)]
    prompt = np.asarray(row["prompt_ids"], np.int64)
    made = []
    for field in ANSWERS[kind]:
        ids = np.concatenate([prompt, np.asarray(row[field], np.int64)])
        made.append(TrainedSequence(ids, np.arange(1, len(ids)) >= len(prompt)))
    return made


def find_trained_tokens(row: Row) -> npt.NDArray[np.bool_]:
    """Return the sequences' `trained`, one after the other."""
    return np.concatenate([sequence.trained for sequence in list_sequences(row)])


def list_groups(rows: Sequence[Row]) -> list[list[int]]:
    """Return the places of rows that only have a gradient together: rollouts of the same prompt; any other row alone."""
    if find_kind(rows[0]) != "rollout":
        return [[place] for place in range(len(rows))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(tuple(row["prompt_ids"]), []).append(place)
    return list(groups.values())


def check_rows(rows: Sequence[Row]) -> None:
    """Raise DataError, with the row and the field, for rows that no proof can use."""
    if len(rows) < 2:
        raise DataError(f"a batch of {len(rows)} cannot be cut", remedy="Give at least two rows, of different lengths")
    kinds = []
    for place, row in enumerate(rows):
        _check_row(place, row)
        kinds.append(find_kind(row))
        if kinds[place] != kinds[0]:
            raise DataError(f"row {place} is a {kinds[place]} row, and row 0 a {kinds[0]} row", remedy="Give rows of one kind")
    if not any(find_trained_tokens(row).any() for row in rows):
        raise DataError("no token of any row is trained", remedy=f"Give labels other than {UNTRAINED} after the first token")
    if kinds[0] == "rollout" and all(_is_uniform([rows[place] for place in group]) for group in list_groups(rows)):
        raise DataError(
            "every prompt's rollouts have the same reward, so no rollout has an advantage",
            remedy="Give several rollouts of a prompt, with different rewards",
        )


def _check_row(place: int, row: Row) -> None:
    kind = "supervised" if "input_ids" in row else find_kind(row)
    for field in KINDS[kind]:
        if field == "reward":
            if not isinstance(row[field], int | float) or not np.isfinite(row[field]):
                raise DataError(f"row {place}: reward is no finite number", remedy="Give each rollout its reward")
            continue
        least = 2 if kind == "supervised" else 1
        values = np.asarray(row.get(field, ()))
        if values.ndim != 1 or len(values) < least or values.dtype.kind not in "iu":
            raise DataError(
                f"row {place}: {field} is no list of {'two' if least == 2 else 'one'} or more integers",
                remedy="Give one number for every token",
            )
    if kind == "supervised" and len(row["input_ids"]) != len(row["labels"]):
        raise DataError(
            f"row {place}: {len(row['labels'])} labels for {len(row['input_ids'])} tokens",
            remedy=f"Give every token a label, {UNTRAINED} where it is not trained",
        )


def _is_uniform(rows: Sequence[Row]) -> bool:
    return len({float(row["reward"]) for row in rows}) == 1
