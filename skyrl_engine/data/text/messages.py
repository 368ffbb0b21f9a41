"""Chat messages of a row, in the one shape that chat templates take."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import Factory, evolve, frozen

from skyrl_engine.config.schema.data import LossOn
from skyrl_engine.data.images.files import StoredImage, parse_image
from skyrl_engine.data.sources.rows import Row, join_names, kind_of
from skyrl_engine.data.text.turn_weights import in_prompt, pop_turn_weight
from skyrl_engine.errors import DataError, ImageError

Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_CALL = "function_call"
"""The role of a message that is a call of a tool, in LLaMA-Factory's data."""
_IMAGE_KEYS = ("image", "image_url", "bytes", "url", "path")
"""An image part holds its image under one of these keys."""
_PLACE = "<image>"
_CARRIES = "skyrl_engine.carries"
"""Key under which a message keeps what it says about its loss, until its conversation is made."""


@frozen
class Conversation:
    """Chat messages for the model's template. Loss may fall on assistant messages from position `first_reply` on.

    `carries` holds, by position, the weights that messages themselves give their loss: they count before `data.loss_on`.
    `images` are those of the messages' image parts, in their order, not yet read.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template_options: Mapping[str, Any] = Factory(dict)
    first_reply: int = 0
    images: tuple[StoredImage, ...] = ()
    carries: Mapping[int, float] = Factory(dict)

    def turns(self, loss_on: LossOn) -> list[int]:
        """Return the positions of the assistant messages that carry loss: the last or all, except where a message says otherwise."""
        replies = [i for i, message in enumerate(self.messages) if message["role"] == "assistant" and i >= self.first_reply]
        chosen = set(replies[-1:] if loss_on == "last" else replies)
        return [i for i in replies if self.carries.get(i, i in chosen)]

    def weight(self, turn: int) -> float:
        """Return the weight of a turn that carries loss."""
        return self.carries.get(turn, 1.0)

    def with_messages(self, messages: Sequence[Message]) -> "Conversation":
        return evolve(self, messages=messages)

    def with_tools(self, tools: Sequence[Any]) -> "Conversation":
        return evolve(self, tools=tools)

    @property
    def excluded(self) -> int:
        """Return the number of assistant messages that say they carry no loss."""
        return sum(not carries and self.messages[i]["role"] == "assistant" for i, carries in self.carries.items())

    @property
    def unread_arguments(self) -> int:
        """Return the number of tool calls whose arguments are a text that could not be read as a JSON object."""
        calls = (call for message in self.messages for call in message.get("tool_calls") or () if isinstance(call, Mapping))
        return sum(isinstance(_function_of(call).get("arguments"), str) for call in calls)


def messages_of(row: Row, column: str, *, single: bool = False) -> list[Message]:
    """Return the messages in a column, a list or its JSON text; where `single` is allowed, it may be one message alone. Raises
    DataError.
    """
    value = row.values.get(column)
    if isinstance(value, str):
        value = _from_json(row, column, value)
    if single and isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list | tuple) and not value:
        raise row.wrong(column, "the list of messages is empty", "Remove the sample, or give it messages")
    if not isinstance(value, list | tuple):
        raise row.wrong(column, f"a list of messages is needed, not {kind_of(value)}", "Store a list of {role, content} objects")
    return [_message(row, column, number, message) for number, message in enumerate(value)]


def prompt_messages_of(row: Row, column: str) -> list[Message]:
    """Return messages that a model is given: what they say about their loss is left out."""
    return [{key: value for key, value in message.items() if key != _CARRIES} for message in messages_of(row, column)]


def _message(row: Row, column: str, number: int, value: object) -> Message:
    if not isinstance(value, Mapping):
        raise row.wrong(column, f"message {number} is {kind_of(value)}, not an object", "Store a list of {role, content} objects")
    message = dict(value)
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        raise row.wrong(
            column, f"message {number} has no role; it has {join_names(list(value))}", "Give every message a role and content"
        )
    if role == _CALL:
        message |= _parse_call(row, column, number, message.get("content"))
    message["role"] = _ROLES.get(role, role)
    message[_CARRIES] = pop_turn_weight(row, column, number, message)
    message["content"] = _content(row, column, number, message)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _parse_call(row: Row, column: str, number: int, text: Any) -> Message:
    """Return what a message holds whose text is a call, or a list of calls, in JSON: {name, arguments}."""
    value = _from_json(row, column, text) if isinstance(text, str) else text
    calls = value if isinstance(value, list | tuple) else [value]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise row.wrong(
            column,
            f"message {number} of role {_CALL!r} is no JSON object with name and arguments, nor a list of them",
            "Store the call as JSON, or as tool_calls of a message of role assistant",
        )
    return {"content": "", "tool_calls": [{"type": "function", "function": dict(call)} for call in calls]}


def _content(row: Row, column: str, number: int, message: Message) -> str | list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and (message.get("tool_calls") or message.get("reasoning_content")):
        return ""
    if not isinstance(content, list | tuple):
        raise row.wrong(
            column,
            f"message {number} has {kind_of(content)} as content",
            "Give every message a string or a list of parts as content",
        )
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)  # templates of text models take strings only
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "image", "image_url"):
            raise row.wrong(
                column,
                f"message {number} has a part that is neither text nor image: {str(part)[:60]}",
                "Use parts of type text or image",
            )
    return [{"type": "text", "text": part["text"]} if part["type"] == "text" else dict(part) for part in parts]


def _tool_call(call: Any) -> Any:
    """Return the tool call with arguments as an object: chat interfaces store JSON text, templates expect to write the JSON themselves."""
    if not isinstance(call, Mapping):
        return call
    inner = _function_of(call)
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError:
            parsed = arguments
        if isinstance(parsed, dict):
            inner = {**inner, "arguments": parsed}
    return {**call, "function": inner} if "function" in call else dict(inner)


def _function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = call.get("function")
    return inner if isinstance(inner, Mapping) else call


def _from_json(row: Row, column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise row.wrong(column, f"the text is not JSON: {error}", "Store a list, or valid JSON text") from error


def conversation_of(row: Row, messages: list[Message], first_reply: int = 0) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages[first_reply:]):
        roles = ", ".join(message["role"] for message in messages[first_reply:]) or "none"
        raise DataError(
            f"{row.name} has no assistant message to learn from, only {roles}",
            remedy="Remove the sample, or name the reply's role assistant",
        )
    marks = [message.pop(_CARRIES, None) for message in messages]
    carries = {i: value for i, value in enumerate(marks) if value is not None}
    if wrong := [i for i, value in carries.items() if value and i < first_reply]:
        raise in_prompt(row, wrong[0])
    tools = row.values.get("tools")
    if isinstance(tools, str):
        tools = _from_json(row, "tools", tools) if tools.strip() else None
    if isinstance(tools, list | tuple):
        tools = [_from_json(row, "tools", tool) if isinstance(tool, str) else tool for tool in tools]
    elif tools is not None:
        raise row.wrong("tools", f"a list of tools is needed, not {kind_of(tools)}", "Store a list of JSON schemas")
    options = row.values.get("chat_template_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise row.wrong(
            "chat_template_kwargs", f"an object is needed, not {kind_of(options)}", "Store the template's options by name"
        )
    messages, images = _with_images(row, messages)
    return Conversation(messages, tools or None, dict(options or {}), first_reply, images, carries)


def _with_images(row: Row, messages: list[Message]) -> tuple[list[Message], tuple[StoredImage, ...]]:
    """Reduce image parts to `{"type": "image"}`, which templates know, and return the images in the order of those parts.

    A part without an image of its own takes the next entry of the columns `images` or `image`.
    """
    filled = image_columns(row)
    if len(filled) > 1:
        raise ImageError(
            f"{row.name} has images in the columns {join_names(filled)}",
            remedy='Keep the column whose images the messages ask for, or set data.bad_images = "drop"',
        )
    column, loose = next(iter(filled.items()), ("images", []))
    messages = _with_places(messages, len(loose))
    images: list[StoredImage] = []
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
            own = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)
            if own is None:
                if taken == len(loose):
                    raise _mismatch(row, column, f"has {len(loose)} images for more image parts", "Give every image part its image")
                own, taken = loose[taken], taken + 1
            images.append(parse_image(own, f"{row.name}, image {len(images) + 1}", row.folder))
            parts.append({"type": "image"})
        result.append({**message, "content": parts})
    if taken != len(loose):
        raise _mismatch(
            row, column, f"{len(loose)} images for {taken} image parts", "Give every image a part of type image in the messages"
        )
    return result, tuple(images)


def _with_places(messages: list[Message], images: int) -> list[Message]:
    """Return the messages with a part for every `<image>` of their texts, as LLaMA-Factory and OpenRLHF write the place of an image, where
    there are as many of them as `images` and no image parts.
    """
    texts = [message["content"] for message in messages if isinstance(message["content"], str)]
    if not images or len(texts) < len(messages) or sum(text.count(_PLACE) for text in texts) != images:
        return messages
    placed = []
    for message in messages:
        first, *others = message["content"].split(_PLACE)
        parts = [{"type": "text", "text": first}] if first else []
        for text in others:
            parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        placed.append({**message, "content": parts} if others else message)
    return placed


def image_columns(row: Row) -> dict[str, list[Any]]:
    """Return the image columns that belong to the messages, each with the images of this row; a column without any is left out."""
    columns = {column: row.values.get(column) for column in ("images", "image")}
    several = (list, tuple, np.ndarray)
    lists = {
        column: list(value) if isinstance(value, several) else [value] for column, value in columns.items() if value is not None
    }
    return {column: images for column, images in lists.items() if images}


def _mismatch(row: Row, column: str, what: str, remedy: str) -> ImageError:
    return ImageError(f"{row.name}, column {column!r}: {what}", remedy=f'{remedy}, or set data.bad_images = "drop"')
