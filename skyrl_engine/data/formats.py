"""From a row to an example: which columns make a dataset chat, prompt and completion, alpaca, text or tokens."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
from attrs import Factory, frozen

from skyrl_engine.config.schema import DataFormat
from skyrl_engine.contracts.ragged import AnyArray
from skyrl_engine.data.rows import Row
from skyrl_engine.errors import DataError

Message = dict[str, Any]


@frozen
class Conversation:
    """Chat messages for the model's template. Loss may fall on assistant messages from position `first_reply` on.

    `images` are references (path, address, or row and position) in the order of the image parts of the messages.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template_options: Mapping[str, Any] = Factory(dict)
    first_reply: int = 0
    images: tuple[str, ...] = ()


@frozen
class PlainText:
    """Text without a template. Loss falls on everything from character `response_start` on, and on the end-of-text token that follows."""

    text: str
    response_start: int = 0


@frozen(eq=False)
class Tokens:
    """Ready tokens: `input_ids` int32[T] and `loss` bool[T]."""

    input_ids: AnyArray
    loss: AnyArray


Example = Conversation | PlainText | Tokens
KnownFormat = Literal["tokens", "messages", "prompt_completion", "alpaca", "text"]

# In the order in which they are tried. Each needs one column of every group.
_NEEDED: Mapping[KnownFormat, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",), ("labels", "loss_mask", "num_actions")),
    "messages": (("messages", "conversations"),),
    "prompt_completion": (("prompt",), ("completion",)),
    "alpaca": (("instruction",), ("output",)),
    "text": (("text",),),
}

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def detect(asked: DataFormat, first: Row) -> KnownFormat:
    """The format of a dataset whose first row is `first`. Raises DataError naming the columns that are there and those that are needed."""
    have = list(first.values)
    if asked != "auto":
        if not _fits(asked, have):
            raise _missing(asked, first)
        return asked
    for name in _NEEDED:
        if _fits(name, have):
            return name
    known = [column for groups in _NEEDED.values() for group in groups for column in group]
    raise DataError(
        f"no known format has the columns of the dataset: {_listed(have)}",
        remedy=_suggestion(have, known) or "Rename the columns, or convert the dataset to one of the formats above",
        details=[f"format {name} needs {_described(name)}" for name in _NEEDED],
    )


def to_example(row: Row, kind: KnownFormat, *, has_template: bool) -> Example:
    """The row as an example. Raises DataError naming the row and the column."""
    if not _fits(kind, list(row.values)):
        raise _missing(kind, row)
    if kind == "messages":
        column = "messages" if row.values.get("messages") is not None else "conversations"
        return _conversation(row, _messages(row, column))
    if kind == "prompt_completion":
        return _prompt_completion(row)
    if kind == "alpaca":
        return _alpaca(row, has_template=has_template)
    if kind == "text":
        return PlainText(_string(row, "text"))
    return _tokens(row)


def _fits(name: KnownFormat, columns: Sequence[str]) -> bool:
    return all(any(column in columns for column in group) for group in _NEEDED[name])


def _missing(name: KnownFormat, row: Row) -> DataError:
    have = list(row.values)
    lacking = next(group for group in _NEEDED[name] if not any(column in have for column in group))
    return DataError(
        f"{row.name} has no column {' or '.join(map(repr, lacking))}, which format {name!r} needs; it has {_listed(have)}",
        remedy=_suggestion(have, lacking) or f"Add the column, or set data.format to another of {', '.join(_NEEDED)}",
    )


def _described(name: KnownFormat) -> str:
    return " and ".join(" or ".join(group) for group in _NEEDED[name])


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns)) or "none"


def _suggestion(have: Sequence[str], wanted: Sequence[str]) -> str | None:
    for column in have:
        near = get_close_matches(column, wanted, n=1, cutoff=0.7)
        if near and column not in wanted:
            return f"Did you mean {near[0]!r} instead of {column!r}?"
    return None


def _wrong(row: Row, column: str, what: str, remedy: str) -> DataError:
    return DataError(f"{row.name}, column {column!r}: {what}", remedy=remedy)


def _string(row: Row, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str):
        raise _wrong(row, column, f"a string is needed, not {_kind(value)}", "Store text in this column")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _messages(row: Row, column: str) -> list[Message]:
    value = row.values[column]
    if isinstance(value, str):
        value = _from_json(row, column, value)
    if not isinstance(value, list | tuple) or not value:
        raise _wrong(row, column, f"a list of messages is needed, not {_kind(value)}", "Store a list of {role, content} objects")
    return [_message(row, column, number, message) for number, message in enumerate(value)]


def _message(row: Row, column: str, number: int, given: object) -> Message:
    if not isinstance(given, Mapping):
        raise _wrong(row, column, f"message {number} is {_kind(given)}, not an object", "Store a list of {role, content} objects")
    message = dict(given)
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        raise _wrong(
            row, column, f"message {number} has no role; it has {_listed(list(given))}", "Give every message a role and content"
        )
    message["role"] = _ROLES.get(role, role)
    message["content"] = _content(row, column, number, message)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _content(row: Row, column: str, number: int, message: Message) -> str | list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and (message.get("tool_calls") or message.get("reasoning_content")):
        return ""
    if not isinstance(content, list | tuple):
        raise _wrong(
            row,
            column,
            f"message {number} has {_kind(content)} as content",
            "Give every message a string or a list of parts as content",
        )
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)  # templates of text models take strings only
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "image", "image_url"):
            raise _wrong(
                row,
                column,
                f"message {number} has a part that is neither text nor image: {str(part)[:60]}",
                "Use parts of type text or image",
            )
    return [{"type": "text", "text": part["text"]} if part["type"] == "text" else dict(part) for part in parts]


def _tool_call(call: Any) -> Any:
    """Arguments as an object: chat interfaces store them as JSON text, templates expect to write the JSON themselves."""
    if not isinstance(call, Mapping):
        return call
    inner = call.get("function") if isinstance(call.get("function"), Mapping) else call
    assert isinstance(inner, Mapping)
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError:
            parsed = arguments
        if isinstance(parsed, dict):
            inner = {**inner, "arguments": parsed}
    return {**call, "function": inner} if "function" in call else dict(inner)


def _from_json(row: Row, column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(row, column, f"the text is not JSON: {error}", "Store a list, or valid JSON text") from error


def _conversation(row: Row, messages: list[Message], first_reply: int = 0) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages[first_reply:]):
        roles = ", ".join(message["role"] for message in messages[first_reply:]) or "none"
        raise DataError(
            f"{row.name} has no assistant message to learn from, only {roles}",
            remedy="Remove the sample, or name the reply's role assistant",
        )
    tools = row.values.get("tools")
    if isinstance(tools, str):
        tools = _from_json(row, "tools", tools) if tools.strip() else None
    if isinstance(tools, list | tuple):
        tools = [_from_json(row, "tools", tool) if isinstance(tool, str) else tool for tool in tools]
    elif tools is not None:
        raise _wrong(row, "tools", f"a list of tools is needed, not {_kind(tools)}", "Store a list of JSON schemas")
    options = row.values.get("chat_template_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise _wrong(
            row, "chat_template_kwargs", f"an object is needed, not {_kind(options)}", "Store the template's options by name"
        )
    messages, images = _with_image_references(row, messages)
    return Conversation(messages, tools or None, dict(options or {}), first_reply, images)


def _with_image_references(row: Row, messages: list[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Image parts reduced to `{"type": "image"}`, which templates know, and what each of them refers to.

    A part without a reference of its own takes the next entry of the columns `images` or `image`.
    """
    column = "images" if row.values.get("images") is not None else "image"
    given = row.values.get(column)
    loose = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    references: list[str] = []
    taken = 0
    result = []
    for message in messages:
        if isinstance(message["content"], str):
            result.append(message)
            continue
        parts = []
        for part in message["content"]:
            if part["type"] == "text":
                parts.append(part)
                continue
            own = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
            if own is None:
                if taken == len(loose):
                    raise _wrong(row, column, f"has {len(loose)} images for more image parts", "Give every image part its image")
                own, taken = loose[taken], taken + 1
            references.append(_reference(own) or f"{row.where}, image {len(references)}")
            parts.append({"type": "image"})
        result.append({**message, "content": parts})
    if taken != len(loose):
        raise _wrong(
            row, column, f"{len(loose)} images for {taken} image parts", "Give every image a part of type image in the messages"
        )
    return result, tuple(references)


def _reference(image: object) -> str | None:
    """Path or address of an image; None where only its bytes are stored, which stay in the dataset."""
    if isinstance(image, Mapping):
        image = image.get("path") or image.get("url")
    return image if isinstance(image, str) else None


def _prompt_completion(row: Row) -> Example:
    prompt, completion = row.values["prompt"], row.values["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise _wrong(
            row,
            "completion",
            f"it is {_kind(completion)} while the prompt is {_kind(prompt)}",
            "Store both as text, or both as lists of messages",
        )
    if isinstance(prompt, str):
        return PlainText(prompt + _string(row, "completion"), len(prompt))
    before = _messages(row, "prompt")
    return _conversation(row, [*before, *_messages(row, "completion")], first_reply=len(before))


def _alpaca(row: Row, *, has_template: bool) -> Example:
    """A chat of two messages where the tokenizer has a template, else headed sections of plain text."""
    instruction, output = _string(row, "instruction"), _string(row, "output")
    context = _string(row, "input") if row.values.get("input") is not None else ""
    if has_template:
        request = f"{instruction}\n\n{context}" if context else instruction
        return _conversation(row, [{"role": "user", "content": request}, {"role": "assistant", "content": output}])
    section = f"### Input:\n{context}\n\n" if context else ""
    prompt = f"### Instruction:\n{instruction}\n\n{section}### Response:\n"
    return PlainText(prompt + output, len(prompt))


def _tokens(row: Row) -> Tokens:
    ids = _integers(row, "input_ids")
    if len(ids) == 0:
        raise _wrong(row, "input_ids", "there is no token", "Remove empty samples")
    if (ids < 0).any():
        raise _wrong(
            row, "input_ids", f"the token id {int(ids.min())} is negative", "Say what carries no loss with labels or loss_mask"
        )
    if row.values.get("labels") is not None:
        return Tokens(ids, _loss_of_labels(row, ids))
    actions = len(ids)
    if row.values.get("num_actions") is not None:
        value = row.values["num_actions"]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= len(ids):
            raise _wrong(
                row, "num_actions", f"{value!r} response tokens do not fit {len(ids)} tokens", "Count the tokens of the response"
            )
        actions = value
    loss = np.zeros(len(ids), dtype=np.bool_)
    if row.values.get("loss_mask") is None:
        loss[len(ids) - actions :] = True
        return Tokens(ids, loss)
    mask = _integers(row, "loss_mask")
    if len(mask) != actions:
        what = "response tokens" if actions < len(ids) else "tokens"
        raise _wrong(
            row, "loss_mask", f"it has {len(mask)} entries for {actions} {what}", "Give one entry per token of the response"
        )
    if ((mask != 0) & (mask != 1)).any():
        raise _wrong(row, "loss_mask", "it holds values other than 0 and 1", "Use 0 and 1")
    loss[len(ids) - actions :] = mask.astype(np.bool_)
    return Tokens(ids, loss)


def _loss_of_labels(row: Row, ids: AnyArray) -> AnyArray:
    """Labels repeat the token ids at the same places, -100 where there is no loss (the convention of transformers)."""
    labels = _integers(row, "labels")
    if len(labels) != len(ids):
        raise _wrong(row, "labels", f"it has {len(labels)} entries for {len(ids)} tokens", "Give one label per token")
    loss: AnyArray = labels != -100
    if (labels[loss] != ids[loss]).any():
        place = int(np.flatnonzero(loss & (labels != ids))[0])
        raise _wrong(
            row, "labels", f"label {labels[place]} at position {place} is not the token {ids[place]}", "Store labels unshifted"
        )
    return loss


def _integers(row: Row, column: str) -> AnyArray:
    value = row.values[column]
    array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else None
    if array is not None and array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array is not None and array.dtype == np.bool_:
        array = array.astype(np.int32)
    if array is None or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise _wrong(row, column, "a flat list of integers is needed", "Store plain integers")
    return array.astype(np.int32, copy=False)
