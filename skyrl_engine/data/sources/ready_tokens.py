"""Rows that hold tokens already: in one list, or as recorded rollouts, prompt and response apart."""

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.data.sources.rows import Row

PROMPT_COLUMNS = ("prompt_ids", "prompt_token_ids")
RESPONSE_COLUMNS = ("response_ids", "response_token_ids")


@frozen(eq=False)
class Tokens:
    """Ready tokens: `input_ids` int32[T] and `loss` bool[T]; the last `response` of them are the response."""

    input_ids: AnyArray
    loss: AnyArray
    response: int


def tokens_of(row: Row) -> Tokens:
    """Read a row with all its tokens in `input_ids`. Raises DataError naming the row and the column."""
    ids = _token_ids(row, "input_ids", "Say what carries no loss with labels or loss_mask")
    if len(ids) == 0:
        raise row.wrong("input_ids", "there is no token", "Remove empty samples")
    _refuse_padding(row, len(ids))
    if row.values.get("labels") is not None:
        loss = _loss_of_labels(row, ids)
        return Tokens(ids, loss, len(ids) - int(np.argmax(loss)) if loss.any() else 0)
    actions = len(ids)
    if row.values.get("num_actions") is not None:
        value = row.values["num_actions"]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= len(ids):
            raise row.wrong(
                "num_actions", f"{value!r} response tokens do not fit {len(ids)} tokens", "Count the tokens of the response"
            )
        actions = value
    return Tokens(ids, _loss_of_mask(row, len(ids), actions), actions)


def _refuse_padding(row: Row, length: int) -> None:
    """Refuse a row whose `attention_mask` leaves tokens out: a sample has no padding."""
    if row.values.get("attention_mask") is None:
        return
    mask = _integers(row, "attention_mask")
    if len(mask) != length or (mask != 1).any():
        raise row.wrong("attention_mask", "it is not 1 at every token: some are padding", "Store samples without padding")


def rollout_of(row: Row) -> Tokens:
    """Read a row with separate tokens of prompt and response. Raises DataError naming the row and the column."""
    prompt, response = (
        _token_ids(row, _first_present(row, names), "Store token ids") for names in (PROMPT_COLUMNS, RESPONSE_COLUMNS)
    )
    ids = np.concatenate([prompt, response])
    if len(ids) == 0:
        raise row.wrong(_first_present(row, RESPONSE_COLUMNS), "there is no token, and none in the prompt", "Remove empty samples")
    return Tokens(ids, _loss_of_mask(row, len(ids), len(response)), len(response))


def _first_present(row: Row, names: tuple[str, ...]) -> str:
    return next((name for name in names if row.values.get(name) is not None), names[0])


def _loss_of_mask(row: Row, length: int, actions: int) -> AnyArray:
    """Return bool[length]: `loss_mask` on the last `actions` tokens, or all of these without a mask."""
    loss = np.zeros(length, dtype=np.bool_)
    if row.values.get("loss_mask") is None:
        loss[length - actions :] = True
        return loss
    mask = _integers(row, "loss_mask")
    if len(mask) != actions:
        what = "response tokens" if actions < length else "tokens"
        raise row.wrong("loss_mask", f"it has {len(mask)} entries for {actions} {what}", "Give one entry per token of the response")
    if ((mask != 0) & (mask != 1)).any():
        raise row.wrong("loss_mask", "it holds values other than 0 and 1", "Use 0 and 1")
    loss[length - actions :] = mask.astype(np.bool_)
    return loss


def _loss_of_labels(row: Row, ids: AnyArray) -> AnyArray:
    """Read `labels`, which repeat the token ids at the same positions, with -100 where there is no loss (as transformers does)."""
    labels = _integers(row, "labels")
    if len(labels) != len(ids):
        raise row.wrong("labels", f"it has {len(labels)} entries for {len(ids)} tokens", "Give one label per token")
    loss: AnyArray = labels != -100
    if (labels[loss] != ids[loss]).any():
        place = int(np.flatnonzero(loss & (labels != ids))[0])
        raise row.wrong(
            "labels", f"label {labels[place]} at position {place} is not the token {ids[place]}", "Store labels unshifted"
        )
    return loss


def _token_ids(row: Row, column: str, remedy: str) -> AnyArray:
    ids = _integers(row, column)
    if (ids < 0).any():
        raise row.wrong(column, f"the token id {int(ids.min())} is negative", remedy)
    return ids


def _integers(row: Row, column: str) -> AnyArray:
    value = row.values.get(column)
    array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else None
    if array is not None and array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array is not None and array.dtype == np.bool_:
        array = array.astype(np.int32)
    if array is None or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise row.wrong(column, "a flat list of integers is needed", "Store plain integers")
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() > limits.max:
        raise row.wrong(column, "an integer needs more than 32 bits", "Store token ids of the tokenizer, not hashes")
    return array.astype(np.int32, copy=False)
