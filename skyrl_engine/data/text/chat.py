"""Rendering conversations with the model's chat template, and finding each assistant turn in the rendered text.

Few templates mark what the assistant says. Where one does (`{% generation %}`) its marks are used. Elsewhere a turn starts where the
template's own generation prompt ends, since that is the text the model will be given, and ends where the template's rendering up to that
message ends, end-of-turn token included.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from attrs import field, frozen

from skyrl_engine.config.schema.data import LossOn
from skyrl_engine.data.text.messages import Conversation, Message
from skyrl_engine.data.text.omissions import OmissionCheck
from skyrl_engine.errors import DataError, ModelError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_Span = tuple[int, int, float]
"""Characters [start, end), and the weight of their loss."""
_MARK = "qZmark{}Zq"


@frozen
class RenderedChat:
    """The conversation as the template writes it, and the character spans [start, end) that carry loss, in order, each with its weight.

    `removed_reasoning` says that the template left out the reasoning of an earlier turn.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]
    removed_reasoning: bool = False


@frozen(eq=False)
class ChatTemplate:
    """Renders with `tokenizer.apply_chat_template`."""

    tokenizer: Any
    _marks_generation: dict[bool, bool] = field(factory=dict, init=False)
    _omissions: OmissionCheck = field(init=False)

    @_omissions.default
    def _check_of_this_template(self) -> OmissionCheck:
        return OmissionCheck(lambda chat: self.attempt(chat, chat.messages))

    def render(self, chat: Conversation, *, name: str, loss_on: LossOn) -> RenderedChat:
        """Render the conversation with the loss spans of its last assistant turn, of all from `chat.first_reply` on, except where a message
        itself says otherwise, or of the text from the first of all to the end; `name` is for errors.

        Raises DataError naming the sample where the template refuses it, where it leaves out what a message holds, or where a turn cannot be
        found in what the template wrote.
        """
        full = self._whole(chat, name)
        removed_reasoning = self._omissions(chat, full, name=name)
        wanted = chat.turns(loss_on)
        if loss_on == "completion":
            return RenderedChat(full, *self._find_completion(chat, full, name, wanted), removed_reasoning)
        find = self._find_generation_spans if wanted and self._has_generation_tags(chat) else self._turn_spans
        spans = find(chat, full, name, wanted)
        closed = tuple(self._trim_after_end(full, start, end) for start, end, _ in spans)
        return RenderedChat(full, closed, tuple(weight for *_, weight in spans), removed_reasoning)

    def _find_completion(
        self, chat: Conversation, full: str, name: str, wanted: Sequence[int]
    ) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...]]:
        """Return the span from the first wanted turn to the end of the text, and its weight."""
        if chat.excluded or len({chat.weight(turn) for turn in wanted}) > 1:
            raise DataError(
                f'{name}: a message has a weight of its own, and with data.loss_on = "completion" all tokens carry the same loss',
                remedy='Set data.loss_on = "all", or remove the weights of messages',
            )
        if not wanted:
            return (), ()
        start, *_ = self._turn_spans(chat, full, name, wanted[:1])[0]
        return ((start, len(full)),), (chat.weight(wanted[0]),)

    def prompt(self, chat: Conversation, *, name: str) -> str:
        """Render the conversation as a model is given it: the reply comes next. Raises DataError as `render` does."""
        self._omissions(chat, self._whole(chat, name), name=name)
        return self._whole(chat, name, generation_prompt=True)

    def whole(self, chat: Conversation, *, name: str) -> str:
        """Render the conversation to its end. Raises DataError as `render` does."""
        full = self._whole(chat, name)
        self._omissions(chat, full, name=name)
        return full

    def write(self, chat: Conversation, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=chat.tools, add_generation_prompt=generation_prompt, tokenize=False, **chat.template_options
        )
        assert isinstance(text, str)
        return text

    def attempt(self, chat: Conversation, messages: Sequence[Message], *, generation_prompt: bool = False) -> str | None:
        """Render part of a conversation as `write` does; None where the template refuses it."""
        if not messages:
            return None
        try:
            return self.write(chat, messages, generation_prompt=generation_prompt)
        except _template_failures():
            return None

    def _whole(self, chat: Conversation, name: str, *, generation_prompt: bool = False) -> str:
        from jinja2 import TemplateSyntaxError

        try:
            full = self.write(chat, chat.messages, generation_prompt=generation_prompt)
        except TemplateSyntaxError as error:
            place = self.tokenizer.name_or_path or "the tokenizer"
            raise ModelError(
                f"the chat template of {place} is no Jinja template: line {error.lineno}: {(error.message or '').rstrip('.')}",
                remedy="Correct the file of model.chat_template or, without that key, chat_template.jinja or tokenizer_config.json there",
            ) from error
        except _template_failures() as error:
            kind = "images" if chat.images else "the conversation"
            raise DataError(
                f"{name}: the chat template refuses {kind}: {error}",
                remedy="Correct the sample, or set model.chat_template to one that takes it",
            ) from error
        if chat.images and "{'type': 'image'}" in full:
            raise DataError(
                f"{name}: the chat template does not know image parts and prints them as text",
                remedy="Use a model whose template takes images, or remove the image parts",
            )
        return full

    def _has_generation_tags(self, chat: Conversation) -> bool:
        with_tools = chat.tools is not None
        if with_tools not in self._marks_generation:
            template = self.tokenizer.get_chat_template(None, chat.tools)
            self._marks_generation[with_tools] = bool(_GENERATION_TAG.search(template))
        return self._marks_generation[with_tools]

    def _turn_spans(self, chat: Conversation, full: str, name: str, wanted: Sequence[int]) -> list[_Span]:
        turns = _Turns(self, chat, full, name)
        spans: list[_Span] = []
        for index in wanted:
            spans.append((*turns.span(index, after=spans[-1][1] if spans else 0), chat.weight(index)))
        return spans

    def _find_generation_spans(self, chat: Conversation, full: str, name: str, wanted: Sequence[int]) -> list[_Span]:
        """Return the spans of the template's `{% generation %}` blocks, of the wanted turns."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marks = render_jinja_template(
            [list(chat.messages)],
            tools=chat.tools,
            chat_template=self.tokenizer.get_chat_template(None, chat.tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **chat.template_options},
        )
        if texts[0] != full:
            raise ModelError(
                "the installed transformers renders chat templates in two different ways",
                remedy="Install another version of transformers, or remove the generation tags from the chat template",
            )
        first = wanted[0]
        weights = {chat.weight(turn) for turn in wanted}
        replies = (i for i, message in enumerate(chat.messages[first:], start=first) if message["role"] == "assistant")
        if len(weights) > 1 or any(i not in wanted for i in replies):
            # a turn between or after them carries no loss, or another one: the blocks of each are where its turn is
            turns = self._turn_spans(chat, full, name, wanted)
            within = [
                (max(start, a), min(end, b), weight) for a, b, weight in turns for start, end in marks[0] if start < b and end > a
            ]
            if not within:
                raise _turn_not_found_error(name, first, "the template's generation tags enclose nothing of it")
            return within
        # a turn may have several blocks; those of the last turn come after everything rendered before it
        before = self.attempt(chat, chat.messages[:first], generation_prompt=True) if first else ""
        floor = _common_prefix(before, full) if before is not None else 0
        spans = [(start, end, *weights) for start, end in marks[0] if end > max(start, floor)]
        if not spans:
            raise _turn_not_found_error(name, first, "the template's generation tags enclose nothing of it")
        return spans

    def _trim_after_end(self, text: str, start: int, end: int) -> tuple[int, int]:
        """Return the span without white space after its end-of-turn token: the model stops at that token and never writes the space."""
        turn = text[start:end]
        stripped = turn.rstrip()
        return (start, start + len(stripped)) if stripped.endswith(self.added_tokens) else (start, end)

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        return (*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens)


@frozen(eq=False)
class _Turns:
    """Finds the turns of one conversation by comparing renderings of its parts."""

    template: ChatTemplate
    chat: Conversation
    full: str
    name: str

    def span(self, index: int, *, after: int) -> tuple[int, int]:
        """Return characters [start, end) of message `index` in the full rendering, not before `after`."""
        messages = self.chat.messages
        prompt = self.template.attempt(self.chat, messages[:index], generation_prompt=True)
        through = self.full if index == len(messages) - 1 else self.template.attempt(self.chat, messages[: index + 1])
        start = len(prompt) if prompt is not None and self.full.startswith(prompt) else None
        end = len(through) if through is not None and self.full.startswith(through) else None
        if start is None or end is None:
            # The template writes this part differently inside the whole conversation (reasoning removed, an empty think block added).
            anchored = self._anchor(index, through)
            if anchored is None:
                raise _turn_not_found_error(
                    self.name, index, "the template renders it differently inside the conversation and its content cannot be found"
                )
            anchor, anchored_end = anchored
            start = self._start_before(anchor, index, prompt, after) if start is None else start
            end = anchored_end
        if not after <= start < end:
            raise _turn_not_found_error(self.name, index, f"its text would be characters {start} to {end}, after {after}")
        return start, end

    def _anchor(self, index: int, through: str | None) -> tuple[int, int] | None:
        """Return a position inside the message in the full rendering, and the end of its turn.

        A mark put into the message shows where that place is: it counts only if the rendering is otherwise unchanged. What follows the mark
        when the message is the last one is the rest of its turn, and must follow in the full rendering too.
        """
        mark = next(mark for number in range(1000) if (mark := _MARK.format(number)) not in self.full)
        if through is None:
            return None
        for marked in _insert_mark(self.chat.messages[index], mark):
            place = self._place([*self.chat.messages[:index], marked, *self.chat.messages[index + 1 :]], mark, self.full)
            own = self._place([*self.chat.messages[:index], marked], mark, through)
            if place is not None and own is not None and self.full.startswith(through[own:], place):
                return place, place + len(through) - own
        return None

    def _place(self, messages: Sequence[Message], mark: str, unmarked: str) -> int | None:
        text = self.template.attempt(self.chat, messages)
        if text is None or text.count(mark) != 1:
            return None
        place = text.index(mark)
        return place if text[:place] + text[place + len(mark) :] == unmarked else None

    def _start_before(self, anchor: int, index: int, prompt: str | None, after: int) -> int:
        """Return the start of the turn around `anchor` where the rendering up to it, with generation prompt, is no prefix of the whole."""
        history = self.template.attempt(self.chat, self.chat.messages[:index])
        if prompt is not None and history is not None and self.full.startswith(history) and prompt.startswith(history):
            # only the generation prompt itself differs (it opens a think block that the finished turn lacks): the turn starts where they part
            return min(_common_prefix(prompt, self.full), anchor)
        header = prompt[len(history) :] if prompt is not None and history is not None and prompt.startswith(history) else ""
        if not header:
            whole = self.template.attempt(self.chat, self.chat.messages, generation_prompt=True)
            header = whole[len(self.full) :] if whole is not None and whole.startswith(self.full) else ""
        start = self.full.rfind(header, after, anchor) if header else -1
        if start < 0:
            raise _turn_not_found_error(self.name, index, "no generation prompt stands before its content")
        return start + len(header)


def _insert_mark(message: Message, mark: str) -> Iterator[Message]:
    """Yield the message with the mark at positions where templates neither trim white space nor remove reasoning."""
    content = message["content"]
    if isinstance(content, str):
        for text in _insert_mark_in_text(content, mark):
            yield {**message, "content": text}
    else:
        for number, part in enumerate(content):
            if part["type"] == "text":
                for text in _insert_mark_in_text(part["text"], mark):
                    yield {**message, "content": [*content[:number], {**part, "text": text}, *content[number + 1 :]]}
    calls = message.get("tool_calls")
    if calls and isinstance(calls[0], dict):
        inner = calls[0].get("function", calls[0])
        named = {**inner, "name": mark + str(inner.get("name", ""))}
        first = {**calls[0], "function": named} if "function" in calls[0] else named
        yield {**message, "tool_calls": [first, *calls[1:]]}


def _insert_mark_in_text(text: str, mark: str) -> Iterator[str]:
    lead = len(text) - len(text.lstrip())
    yield text[:lead] + mark + text[lead:]
    head, closing, answer = text.rpartition("</think>")
    if closing and answer.strip():
        lead = len(answer) - len(answer.lstrip())
        yield head + closing + answer[:lead] + mark + answer[lead:]
    stop = len(text.rstrip())
    yield text[:stop] + mark + text[stop:]


def _common_prefix(left: str, right: str) -> int:
    """Return the number of leading characters that are equal."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _turn_not_found_error(name: str, index: int, why: str) -> DataError:
    return DataError(
        f"{name}: the assistant turn in message {index} cannot be identified in the rendered conversation: {why}",
        remedy="Set model.chat_template to a template with {% generation %} tags, or data.loss_on to last",
    )


def _template_failures() -> tuple[type[Exception], ...]:
    """Return the exception classes that a template raises for a conversation it does not take."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
