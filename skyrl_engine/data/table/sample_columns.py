"""Read the columns of a row other than its tokens: numbers and token ids per response token (advantages, log-probabilities, ...), and ids."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import Factory, field, frozen

from skyrl_engine.contracts.kinds.needs import MODEL_SCORES, column_forms, sample_value
from skyrl_engine.contracts.values.columns import RESERVED_NAMES
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.contracts.values.rollout_columns import ROLLOUT_COLUMNS
from skyrl_engine.data.sources.rows import Row, join_names, kind_of
from skyrl_engine.data.table.teacher_rows import TEACHER_IDS, TEACHER_LOGPROBS, check_teacher
from skyrl_engine.data.text.tokenization import TokenizedSample
from skyrl_engine.errors import DataError
from skyrl_engine.near_words import did_you_mean, find_near_word

LOSS_WEIGHT = "loss_weight"
UNIT = "unit_ids"
GROUP = "group_ids"
ID_COLUMNS = ("sample_ids", GROUP, UNIT)
_TAKEN = RESERVED_NAMES | {*ID_COLUMNS, "num_actions", "loss_mask", "labels", "row", "images", "image_facts"}
_OTHER_NAMES = {row.column: row.name for row in ROLLOUT_COLUMNS if row.column != row.name}
"""Samplers call columns so."""
_KNOWN_NAMES = frozenset(
    ("advantages", "logprobs", "old_logprobs", "old_values", "ref_logprobs", "returns", "rewards", "rollout_logprobs")
)
"""Columns that mean what they are called: none of them is another one misspelled."""
_NO_ID = -1
"""Stands for no token id."""
_OUTCOMES = frozenset({"rewards"})
"""Columns whose sum over a response counts: one number for the whole response is put at its last token."""


@frozen(eq=False)
class Carried:
    """One sample's columns by name, float32[A], or [A, k] of float32 or int64, its ids, and values of the sample: texts or numbers."""

    columns: Mapping[str, AnyArray] = Factory(dict)
    ids: Mapping[str, int] = Factory(dict)
    values: Mapping[str, str | float] = Factory(dict)


@frozen
class ColumnReader:
    """Reads the needed columns; `needed` maps each need (`contracts.kinds.needs`) to who asks for it ("loss ppo needs"), for errors."""

    needed: Mapping[str, str] = field()
    _widths: dict[str, int] = field(factory=dict, init=False)
    _kinds: dict[str, str] = field(factory=dict, init=False)

    @needed.validator
    def _check(self, _attribute: object, needed: Mapping[str, str]) -> None:
        for need, asker in needed.items():
            name = sample_value(need) or next(iter(column_forms((need,))))
            if name in _TAKEN:
                raise DataError(
                    f"{asker} a column called {name!r}, and that name has a meaning of its own",
                    remedy="Give the column another name",
                )

    @property
    def _askers(self) -> dict[str, str]:
        """Who asks for each column, by its name."""
        named = {need: sample_value(need) or next(iter(column_forms((need,)))) for need in self.needed}
        return {named[need]: asker for need, asker in reversed(list(self.needed.items()))}

    def values(self, row: Row) -> dict[str, str | float]:
        """Return the values of the sample that are needed, by name. Raises DataError naming row and column for what is no text or number."""
        values: dict[str, str | float] = {}
        for name in filter(None, map(sample_value, self.needed)):
            column, value = self._value(row, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            kind = "text" if isinstance(value, str) else "number" if number else None
            if kind is None or self._kinds.setdefault(name, kind) != kind:
                others = f", and {name} of others is a {self._kinds[name]}" if kind else ""
                raise row.wrong(
                    column, f"{kind_of(value)} stands here{others}", "Give every sample a text, or every sample a number"
                )
            values[name] = value
        return values

    def __call__(self, row: Row, whole: TokenizedSample, cut: TokenizedSample) -> dict[str, AnyArray]:
        """Return float32[A] by name: A counts from the first loss-carrying token of `cut`, which is `whole` cut to the allowed length.

        A number stands for every token of the response, a number of `rewards` for its last token. A list has one number per response token
        or per token. Columns of several numbers per token are [A, k] of float32, or int64 where they are token ids. Raises DataError naming
        row and column for one that is missing or does not fit, or is not finite where there is loss.
        """
        stop = len(cut.loss)
        start = int(np.argmax(cut.loss))
        columns: dict[str, AnyArray] = {}
        for name, form in column_forms(self.needed).items():
            column, value = self._value(row, name)
            if form != "number":
                columns[name] = self._wide(row, column, value, whole, ids=form == "token ids")[start:stop]
                self._refuse_gaps(row, column, columns[name], cut.loss[start:], start)
                if form == "token ids":
                    np.maximum(columns[name], 0, out=columns[name])
                continue
            if isinstance(value, int | float) and not isinstance(value, bool):
                values = np.zeros(stop - start, dtype=np.float32)
                with np.errstate(over="ignore"):
                    values[slice(-1, None) if name in _OUTCOMES else slice(None)] = np.float32(value)
            else:
                values = _on_all_tokens(row, column, value, whole)[start:stop]
            finite = np.isfinite(values) | ~cut.loss[start:]
            if not finite.all():
                place = int(np.argmin(finite))
                raise row.wrong(
                    column,
                    f"{values[place]} stands at token {start + place}, which carries loss",
                    "Store finite numbers, or give that token no loss",
                )
            columns[name] = values
        if columns.keys() >= {TEACHER_IDS, TEACHER_LOGPROBS} and columns[TEACHER_LOGPROBS].ndim == columns[TEACHER_IDS].ndim == 2:
            check_teacher(row, columns[TEACHER_IDS], columns[TEACHER_LOGPROBS], cut.loss[start:], start)
        return columns

    def _wide(self, row: Row, column: str, value: Any, whole: TokenizedSample, *, ids: bool) -> AnyArray:
        """Return [T, k]: NaN, or `_NO_ID` among ids, where a token has no entry. k is that of the rows before."""
        entries = _entries(row, column, value)
        known = next((entry for entry in entries if entry is not None), None)
        width = self._widths.setdefault(column, 1 if known is None else len(known))
        dtype: type[np.generic] = np.int64 if ids else np.float32
        gap = _NO_ID if ids else np.nan
        for place, entry in enumerate(entries):
            if entry is not None and len(entry) != width:
                raise row.wrong(
                    column,
                    f"entry {place} has {len(entry)} numbers where others have {width}",
                    "Give every token equally many: fill up with ids that it has not, at a log-probability of -100 or less",
                )
        array = np.asarray([[gap] * width if entry is None else entry for entry in entries])
        if array.size == 0:
            array = np.zeros((0, width), dtype=dtype)
        if array.dtype.kind not in ("iu" if ids else "iuf"):
            what = "token ids are needed" if ids else "numbers are needed"
            raise row.wrong(column, f"{what}, not {array.dtype}", "Store plain integers" if ids else "Store plain numbers")
        with np.errstate(over="ignore"):
            return _lay_numbers(row, column, array.astype(dtype), whole, gap)

    def _refuse_gaps(self, row: Row, column: str, values: AnyArray, loss: AnyArray, start: int) -> None:
        wrong = (values < 0 if values.dtype.kind == "i" else ~np.isfinite(values)).any(1) & loss
        if wrong.any():
            place = int(np.argmax(wrong))
            raise row.wrong(
                column,
                f"{values[place].tolist()} stands at token {start + place}, which carries loss",
                "Store token ids of 0 or more, or finite numbers, or give that token no loss",
            )

    def _value(self, row: Row, name: str) -> tuple[str, Any]:
        """Return the name under which the row has the column, and its value."""
        for column in (name, _OTHER_NAMES.get(name)):
            if column is not None and row.values.get(column) is not None:
                return column, row.values[column]
        if name in row.values:
            raise row.wrong(
                name, f"it is null, and {self._askers[name]} it", "Give every sample its numbers, or leave the sample out"
            )
        score = did_you_mean(name, MODEL_SCORES, cutoff=0.85)
        if score and name not in _KNOWN_NAMES and self._askers[name].endswith("needs"):
            raise DataError(
                f"{self._askers[name]} {name!r}, which is neither a score of the model ({', '.join(MODEL_SCORES)}) nor a column of {row.name}",
                remedy=f"{score} Correct its needs",
            )
        stray = [column for column in row.values if column not in self._askers and column not in _KNOWN_NAMES]
        near = find_near_word(name, stray, cutoff=0.7)
        raise DataError(
            f"{row.name} has no column {name!r}, which {self._askers[name]}; it has {join_names(row.values)}",
            remedy=f"Did you mean {name!r} instead of {near!r}? Rename it"
            if near
            else f"Add {name} to every sample: one number per response token, or one for all of them",
        )


def apply_row_weight(row: Row, sample: TokenizedSample) -> TokenizedSample:
    """Return the sample with its weights times the row's `loss_weight`: a number, or a list of one per response token or per token.

    Raises DataError for a weight that is not finite at a token that carries loss.
    """
    value = row.values.get(LOSS_WEIGHT)
    if value is None:
        return sample
    if isinstance(value, int | float) and not isinstance(value, bool):
        factors = np.full(len(sample.loss), value, dtype=np.float32)
    else:
        factors = _on_all_tokens(row, LOSS_WEIGHT, value, sample)
    own = sample.loss.astype(np.float32) if sample.weights is None else sample.weights
    weights = np.multiply(own, factors, out=np.zeros_like(own), where=sample.loss)
    if not np.isfinite(weights).all():
        place = int(np.argmin(np.isfinite(weights)))
        raise row.wrong(LOSS_WEIGHT, f"{factors[place]} stands at token {place}, which carries loss", "Store finite numbers")
    return sample.with_weights(weights)


def _on_all_tokens(row: Row, column: str, value: Any, whole: TokenizedSample) -> AnyArray:
    """Return float32[T]: NaN before the response for a list that covers the response alone."""
    return _lay_numbers(row, column, _numbers(row, column, value), whole, np.nan)


def _lay_numbers(row: Row, column: str, numbers: AnyArray, whole: TokenizedSample, gap: float) -> AnyArray:
    """Return [T, ...]: `gap` before the response for numbers that cover the response alone."""
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
    dtype = np.int64 if numbers.ndim > 1 and numbers.dtype.kind == "i" else np.float32
    values = np.full((tokens, *numbers.shape[1:]), gap, dtype=dtype)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused where there is loss
        values[tokens - len(numbers) :] = numbers
    return values


def _entries(row: Row, column: str, value: Any) -> list[Any]:
    """Return one list of numbers, or None, per token."""
    entries = list(value) if isinstance(value, list | tuple | np.ndarray) else None
    if entries is None or any(entry is not None and not isinstance(entry, list | tuple | np.ndarray) for entry in entries):
        raise row.wrong(
            column, "a list of numbers per token is needed", "Store a list per response token, each of equally many numbers"
        )
    return entries


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
