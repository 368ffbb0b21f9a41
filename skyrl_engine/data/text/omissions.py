"""Find what a conversation holds and the chat template does not write.

Every text of the conversation gets a mark of its own, and the conversation is rendered once more: a field whose mark is missing was left out,
unless a rendering with that field alone marked differs from the plain one. Searching for the text itself would not do: the name of a called
function is also in the list of tools, its arguments in the question. Plain chats, whose kinds of turns were checked once, are searched
for their texts in order, which costs no rendering.

Chat templates of reasoning models remove the reasoning of earlier turns by design; that is reported and allowed. Ids of tool calls are the
bookkeeping of chat interfaces, and the name of a tool's answer repeats that of the call: neither is looked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from skyrl_engine.data.text.messages import Conversation, Message
from skyrl_engine.errors import DataError

Attempt = Callable[[Conversation], str | None]
"""Renders a conversation; None where the template refuses it."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
_OTHERS = ("name", "function_call", "tool_plan", "refusal", "image", "images", "audio", "audios", "video", "videos", "documents")
"""Fields of a message that say something to the model and that some template writes."""
_END_OF_THOUGHT = "</think>"
_TOOLS = -1


@frozen
class _ChatPart:
    """A text of message `message` (`_TOOLS`: of the declared tools) in `field`. `marked` returns the conversation with a mark in it."""

    message: int
    field: str
    what: str
    text: str
    marked: Callable[[Conversation, str], Conversation]
    reasoning: bool = False


@frozen(eq=False)
class OmissionCheck:
    """Checks the conversations of one chat template, and remembers which kinds of plain turns it has seen written."""

    attempt: Attempt
    _written: set[tuple[bool, str, str, bool]] = field(factory=set, init=False)

    def __call__(self, chat: Conversation, full: str, *, name: str) -> bool:
        """Refuse a conversation of which `full`, its rendering, leaves something out; return True where it leaves out earlier reasoning.

        Raises DataError naming the sample, the message and the field.
        """
        turns = _plain_turns(chat)
        if turns is not None and turns <= self._written and _is_in_order(chat, full):
            return False
        parts = list(_list_parts(chat))
        lost = self._find_omitted(chat, full, parts)
        kept_reasoning = {part.message for part in parts if part.reasoning and part not in lost}
        last_question = max((i for i, message in enumerate(chat.messages) if message["role"] == "user"), default=-1)
        removed = False
        for part in lost:
            if part.reasoning and (part.message < last_question or part.message in kept_reasoning):
                removed |= part.message not in kept_reasoning
                continue
            raise _omission_error(part, name)
        if turns is not None:
            self._written.update(turns)
        return removed

    def _find_omitted(self, chat: Conversation, full: str, parts: Sequence[_ChatPart]) -> list[_ChatPart]:
        marks = _marks(full, len(parts))
        marked = chat
        # from the last to the first, so that a place in a text keeps its meaning
        for part, mark in zip(reversed(parts), reversed(marks), strict=True):
            marked = part.marked(marked, mark)
        text = self.attempt(marked)
        missing = [part for part, mark in zip(parts, marks, strict=True) if text is None or mark not in text]
        return [part for part in missing if not self._has_effect(chat, full, part, marks[0])]

    def _has_effect(self, chat: Conversation, full: str, part: _ChatPart, mark: str) -> bool:
        """Say if the rendering depends on the text; where the template refuses the marked text, if the text is in the rendering."""
        text = self.attempt(part.marked(chat, mark))
        return part.text in full if text is None else text != full


def _marks(full: str, count: int) -> list[str]:
    number = next(number for number in range(1000) if f"qO{number}x" not in full)
    return [f"qO{number}x{place}Oq" for place in range(count)]


def _plain_turns(chat: Conversation) -> set[tuple[bool, str, str, bool]] | None:
    """Return the kinds of turns of a conversation whose messages hold text alone (first or not, role before, role, last or not); else None."""
    if chat.tools is not None:
        return None
    turns = set()
    before = ""
    for i, message in enumerate(chat.messages):
        content = message["content"]
        if not isinstance(content, str) or _END_OF_THOUGHT in content:
            return None
        if any(message.get(key) for key in ("tool_calls", *_REASONING, *_OTHERS)):
            return None
        turns.add((i == 0, before, message["role"], i == len(chat.messages) - 1))
        before = message["role"]
    return turns


def _is_in_order(chat: Conversation, full: str) -> bool:
    place = 0
    for message in chat.messages:
        text = message["content"].strip()
        start = full.find(text, place)
        if start < 0:
            return False
        place = start + len(text)
    return True


def _list_parts(chat: Conversation) -> Iterator[_ChatPart]:
    for number, tool in enumerate(chat.tools or ()):
        yield _ChatPart(_TOOLS, "tools", f"the declared tool {_name_of(tool)!r}", _name_of(tool), _in_tool(number))
    for number, message in enumerate(chat.messages):
        yield from _list_content_parts(number, message)
        for key in _REASONING:
            if isinstance(value := message.get(key), str) and value.strip():
                yield _ChatPart(number, key, "the reasoning", value.strip(), _in_field(number, key), reasoning=True)
        for place, call in enumerate(message.get("tool_calls") or ()):
            yield from _list_call_parts(number, place, call)
        for key in _OTHERS:
            if (value := message.get(key)) and not (key == "name" and message["role"] == "tool"):
                yield _ChatPart(number, key, f"{key!r}", str(value), _in_field(number, key))


def _list_content_parts(number: int, message: Message) -> Iterator[_ChatPart]:
    content = message["content"]
    if not isinstance(content, str):
        for place, part in enumerate(content):
            if part["type"] == "text" and part["text"].strip():
                yield _ChatPart(number, "content", f"text part {place}", part["text"].strip(), _in_part(number, place))
        return
    thought, closing, answer = content.rpartition(_END_OF_THOUGHT) if message["role"] == "assistant" else ("", "", content)
    if closing and thought.replace("<think>", "").strip():
        stop = len(thought.rstrip())
        yield _ChatPart(number, "content", "the reasoning", thought.strip(), _in_content(number, stop), reasoning=True)
    if answer.strip():
        yield _ChatPart(number, "content", "the text", answer.strip(), _in_content(number, len(content.rstrip())))


def _list_call_parts(number: int, place: int, call: Any) -> Iterator[_ChatPart]:
    inner = _function(call)
    if inner is None:
        yield _ChatPart(number, "tool_calls", f"call {place}", str(call), _in_list(number, "tool_calls", place))
        return
    name = str(inner.get("name") or "")
    for key in ("name", "arguments"):
        if inner.get(key):
            what = f"the call of {name!r}" if key == "name" else f"the arguments of the call of {name!r}"
            yield _ChatPart(number, "tool_calls", what, str(inner[key]), _in_call(number, place, key))


def _function(call: Any) -> Mapping[str, Any] | None:
    """Return the part of a tool call, or of a declared tool, that names the function; None where there is none."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    return inner if isinstance(inner, Mapping) and (inner.get("name") or inner.get("arguments")) else None


def _name_of(tool: Any) -> str:
    inner = _function(tool)
    return str(tool if inner is None else inner.get("name"))


def _insert_mark(value: Any, mark: str) -> Any:
    """Return the value with the mark in it: at the end of a text, as a key of an object, as an item of a list."""
    if isinstance(value, str):
        stop = len(value.rstrip())
        return value[:stop] + mark + value[stop:]
    if isinstance(value, Mapping):
        return {**value, mark: mark}
    return [*value, mark] if isinstance(value, list | tuple) else f"{value}{mark}"


def _insert_mark_in_function(call: Any, key: str, mark: str) -> Any:
    inner = _function(call)
    if inner is None:
        return _insert_mark(call, mark)
    marked = {**inner, key: _insert_mark(inner.get(key), mark)}
    return {**call, "function": marked} if "function" in call else marked


Marking = Callable[[Conversation, str], Conversation]


def _in_message(number: int, change: Callable[[Message, str], Message]) -> Marking:
    def marked(chat: Conversation, mark: str) -> Conversation:
        messages = [change(message, mark) if i == number else message for i, message in enumerate(chat.messages)]
        return chat.with_messages(messages)

    return marked


def _in_field(number: int, key: str) -> Marking:
    return _in_message(number, lambda message, mark: {**message, key: _insert_mark(message[key], mark)})


def _in_content(number: int, place: int) -> Marking:
    """Return a marking at `place` of the content, as long as nothing before it was marked."""
    return _in_message(
        number, lambda message, mark: {**message, "content": message["content"][:place] + mark + message["content"][place:]}
    )


def _in_part(number: int, place: int) -> Marking:
    def change(message: Message, mark: str) -> Message:
        parts = list(message["content"])
        parts[place] = {**parts[place], "text": _insert_mark(parts[place]["text"], mark)}
        return {**message, "content": parts}

    return _in_message(number, change)


def _in_list(number: int, key: str, place: int) -> Marking:
    def change(message: Message, mark: str) -> Message:
        items = list(message[key])
        items[place] = _insert_mark(items[place], mark)
        return {**message, key: items}

    return _in_message(number, change)


def _in_call(number: int, place: int, key: str) -> Marking:
    def change(message: Message, mark: str) -> Message:
        calls = list(message["tool_calls"])
        calls[place] = _insert_mark_in_function(calls[place], key, mark)
        return {**message, "tool_calls": calls}

    return _in_message(number, change)


def _in_tool(number: int) -> Marking:
    def marked(chat: Conversation, mark: str) -> Conversation:
        tools = list(chat.tools or ())
        tools[number] = _insert_mark_in_function(tools[number], "name", mark)
        return chat.with_tools(tools)

    return marked


def _omission_error(part: _ChatPart, name: str) -> DataError:
    place = "column 'tools'" if part.message == _TOOLS else f"message {part.message}, field {part.field!r}"
    return DataError(
        f"{name}, {place}: the chat template leaves out {part.what}",
        remedy="Set model.chat_template to a template that writes it, or remove it from the sample",
    )
