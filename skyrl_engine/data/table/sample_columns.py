"""Read the columns of a row beside its tokens: numbers per response token (advantages, log-probabilities, rewards, ...) and ids."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import Factory, field, frozen

from skyrl_engine.contracts.kinds.loss import MODEL_SCORES
from skyrl_engine.contracts.values.columns import RESERVED_NAMES
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.data.sources.rows import Row, kind_of, listed
from skyrl_engine.data.text.tokenization import TokenizedSample
from skyrl_engine.errors import DataError

ID_COLUMNS = ("sample_ids", "group_ids", "unit_ids")
_TAKEN = RESERVED_NAMES | {*ID_COLUMNS, "num_actions", "loss_mask", "labels", "row", "images", "image_facts"}
_OTHER_NAMES = {"rollout_logprobs": "logprobs"}
"""Samplers call columns so."""
_KNOWN_NAMES = frozenset(
    ("advantages", "logprobs", "old_logprobs", "old_values", "ref_logprobs", "returns", "rewards", "rollout_logprobs")
)
"""Columns that mean what they are called: none of them is another one misspelled."""
_OUTCOMES = frozenset({"rewards"})
"""Columns whose sum over a response counts: one number for the whole response stands at its last token."""


@frozen(eq=False)
class Carried:
    """One sample's columns, float32[A] by name, and its ids."""

    columns: Mapping[str, npt.NDArray[np.float32]] = Factory(dict)
    ids: Mapping[str, int] = Factory(dict)


@frozen
class ColumnReader:
    """Reads the needed columns; `needed` maps each to who asks for it ("loss ppo needs"), for errors."""

    needed: Mapping[str, str] = field()

    @needed.validator
    def _check(self, _attribute: object, needed: Mapping[str, str]) -> None:
        for name in needed:
            if name in _TAKEN:
                raise DataError(
                    f"{needed[name]} a column called {name!r}, and that name has a meaning of its own",
                    remedy="Give the column another name",
                )

    def __call__(self, row: Row, whole: TokenizedSample, kept: TokenizedSample) -> dict[str, npt.NDArray[np.float32]]:
        """Return float32[A] by name: A counts from the first loss-carrying token of `kept`, which is `whole` cut to the allowed length.

        A number stands for every token of the response, a number of `rewards` for its last token. A list has one number per response token
        or per token. Raises DataError naming row and column for one that is missing or does not fit, or is not finite where there is loss.
        """
        stop = len(kept.loss)
        start = int(np.argmax(kept.loss))
        columns = {}
        for name in self.needed:
            column, value = self._value(row, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                values = np.zeros(stop - start, dtype=np.float32)
                with np.errstate(over="ignore"):
                    values[slice(-1, None) if name in _OUTCOMES else slice(None)] = np.float32(value)
            else:
                values = _on_all_tokens(row, column, value, whole)[start:stop]
            finite = np.isfinite(values) | ~kept.loss[start:]
            if not finite.all():
                place = int(np.argmin(finite))
                raise row.wrong(
                    column,
                    f"{values[place]} stands at token {start + place}, which carries loss",
                    "Store finite numbers, or give that token no loss",
                )
            columns[name] = values
        return columns

    def _value(self, row: Row, name: str) -> tuple[str, Any]:
        """Return the name under which the row has the column, and its value."""
        for column in (name, _OTHER_NAMES.get(name)):
            if column is not None and row.values.get(column) is not None:
                return column, row.values[column]
        if name in row.values:
            raise row.wrong(
                name, f"it is null, and {self.needed[name]} it", "Give every sample its numbers, or leave the sample out"
            )
        score = get_close_matches(name, MODEL_SCORES, n=1, cutoff=0.85)
        if score and name not in _KNOWN_NAMES and self.needed[name].endswith("needs"):
            raise DataError(
                f"{self.needed[name]} {name!r}, which is neither a score of the model ({', '.join(MODEL_SCORES)}) nor a column of {row.name}",
                remedy=f"Did you mean {score[0]!r}? Correct its needs",
            )
        stray = [column for column in row.values if column not in self.needed and column not in _KNOWN_NAMES]
        near = get_close_matches(name, stray, n=1, cutoff=0.7)
        raise DataError(
            f"{row.name} has no column {name!r}, which {self.needed[name]}; it has {listed(row.values)}",
            remedy=f"Did you mean {name!r} instead of {near[0]!r}? Rename it"
            if near
            else f"Add {name} to every sample: one number per response token, or one for all of them",
        )


def _on_all_tokens(row: Row, column: str, value: Any, whole: TokenizedSample) -> AnyArray:
    """Return float32[T]: NaN before the response for a list that covers the response alone."""
    numbers = _numbers(row, column, value)
    tokens = len(whole.loss)
    if whole.response is None:
        raise row.wrong(
            column,
            f"{len(numbers)} numbers cannot be laid on tokens that the engine makes of text",
            "Store one number per sample, or tokens in place of text (formats tokens and rollouts)",
        )
    if len(numbers) != tokens and len(numbers) != whole.response:
        raise row.wrong(
            column,
            f"it has {len(numbers)} values for {whole.response} response tokens ({tokens} tokens with the prompt)",
            "Give one value per response token, or one per token",
        )
    values = np.full(tokens, np.nan, dtype=np.float32)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused where there is loss
        values[tokens - len(numbers) :] = numbers
    return values


def _numbers(row: Row, column: str, value: Any) -> AnyArray:
    """Return a flat array of numbers; null, which samplers write where they scored nothing, becomes NaN."""
    try:
        array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else None
        if array is not None and array.dtype == np.object_:
            array = np.asarray([np.nan if number is None else number for number in array])
    except ValueError:  # lists of different length inside
        array = None
    if array is not None and array.size == 0:
        return np.zeros(0, dtype=np.float32)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
        raise row.wrong(
            column,
            f"a number or a flat list of numbers is needed, not {kind_of(value) if array is None else f'a list of {array.dtype}'}",
            "Store plain numbers",
        )
    return array


class IdReader:
    """Reads the ids of rows: `names` are the id columns of the first row, and every other row must have them too."""

    def __init__(self, first: Row) -> None:
        self.names = tuple(name for name in ID_COLUMNS if first.values.get(name) is not None)
        self._texts: dict[str, dict[str, int]] = {name: {} for name in self.names}
        self._kinds: dict[str, str] = {}
        self._seen: dict[int, str] = {}

    def __call__(self, row: Row) -> dict[str, int]:
        """Return the row's ids; texts are numbered in the order in which they come. Raises DataError naming row and column."""
        return {name: self._id(row, name, row.values.get(name)) for name in self.names}

    def _id(self, row: Row, name: str, value: Any) -> int:
        kind = "integer" if isinstance(value, int) and not isinstance(value, bool) else "text" if isinstance(value, str) else None
        if kind is None:
            raise row.wrong(name, f"an integer or a text is needed, not {kind_of(value)}", "Give every sample its id, or none")
        if self._kinds.setdefault(name, kind) != kind:
            raise row.wrong(name, f"{value!r} is {kind}, the ids before it are not", "Store all ids as integers, or all as text")
        if kind == "text":
            number = self._texts[name].setdefault(value, len(self._texts[name]))
        else:
            number = int(value)
            if not -(2**63) <= number < 2**63:
                raise row.wrong(name, f"{number} needs more than 64 bits", "Store it as text")
        if name == "sample_ids":
            self._check_sample_id(row, number, value, kind)
        return number

    def _check_sample_id(self, row: Row, number: int, value: Any, kind: str) -> None:
        if kind == "text":
            raise row.wrong("sample_ids", f"{value!r} is no integer", "Number the samples from 0, or leave their ids out")
        if number < 0:
            raise row.wrong("sample_ids", f"the id {number} is negative", "Number the samples from 0, or leave their ids out")
        if number in self._seen:
            raise row.wrong(
                "sample_ids", f"the id {number} is that of {self._seen[number]} already", "Give every sample an id of its own"
            )
        self._seen[number] = row.where
