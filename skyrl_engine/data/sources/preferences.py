"""Rows that hold preferences: a chosen and a rejected answer to one prompt, or one answer and a judgement of it.

The prompt has a column of its own or is what both halves begin with, as text, as messages, or in the dialogues of Anthropic's HH data.
What comes after it is the answer, and all of its assistant turns carry loss. Tokenization then lets both answers begin at the same token.
"""

import re
from collections.abc import Sequence
from typing import Any
from unicodedata import category

from attrs import evolve

from skyrl_engine.data.sources.names_to_give import KEY, as_keys
from skyrl_engine.data.sources.questions import MESSAGES, PROMPTS, Prompt, answer, find_prompt, system_of, with_system
from skyrl_engine.data.sources.rows import Row, kind_of
from skyrl_engine.data.text.messages import Conversation, Message, conversation_of, messages_of
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.data.text.template_rule import answer_messages
from skyrl_engine.errors import ColumnError

HALVES = ("chosen", "rejected")
COLUMNS = (("chosen", "chosen_response"), ("rejected", "rejected_response"))
"""Names of the columns of either half; Argilla's data have the longer ones."""
LABELS = ("label", "kto_tag")
_LABEL_VALUES = {"true": True, "1": True, "false": False, "0": False}
ANSWERS = ("completion", "response", "output")
"""Columns of a single answer; without one, the last message is it."""

_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
_SAME = "Give both halves the same prompt, or leave the row out"


Half = Conversation | PlainText


def pair_of(row: Row, *, has_template: bool) -> tuple[Half, Half]:
    """Return the chosen and the rejected half. `has_template` says that the chat template writes texts, dialogues of HH among them.

    Raises DataError naming the row for a half that is missing, empty, or equal to the other, and for halves with different prompts.
    """
    answers = [_require_answer(row, columns) for columns in COLUMNS]
    texts = [isinstance(value, str) for value in answers]
    if texts[0] != texts[1]:
        raise row.wrong(
            "rejected",
            f"it is {kind_of(answers[1])} while the chosen answer is {kind_of(answers[0])}",
            "Store both as text, or both as lists of messages",
        )
    if answers[0] == answers[1]:
        raise row.wrong("rejected", "it is equal to the chosen answer", "Leave the row out: it prefers nothing")
    if not texts[0]:
        halves = [messages_of(row, find_named_column(row, columns), single=True) for columns in COLUMNS]
        dialogues = any(half[0]["role"] != "assistant" for half in halves)
        prompt = find_prompt(row, ("prompt",) if dialogues else PROMPTS)
        return _conversations(row, halves, prompt)
    prompt = find_prompt(row)
    if prompt is not None and prompt.is_text and not has_template:
        before = prompt.text()
        return _texts(row, [before + text for text in answers], [len(before)] * 2)
    if prompt is not None:
        return _conversations(row, [answer_messages(text) for text in answers], prompt)
    if all(text.startswith("\n\nHuman:") and "\n\nAssistant:" in text for text in answers):
        return _hh(row, answers, has_template=has_template)
    start = _count_shared_characters(*answers)
    if has_template:
        start = _word_end(answers, start)
    if start == 0:
        raise row.wrong("rejected", "it has no beginning in common with the chosen text, which would be the prompt", _SAME)
    if has_template:
        # the white space between prompt and answer is part of neither: the template comes there
        common = Prompt("prompt", answers[0][:start].rstrip(), system=system_of(row))
        return _conversations(row, [answer_messages(text[start:].lstrip()) for text in answers], common)
    return _texts(row, answers, [start] * 2)


def read_labelled_answer(row: Row, *, has_template: bool) -> tuple[Half, bool]:
    """Return a row's one answer, and its label: true where it is wanted. Raises DataError for an empty answer and for other labels."""
    label = _label(row)
    column = find_named_column(row, ANSWERS)
    whole = row.values.get(column) is None
    prompt = None if whole else find_prompt(row)
    if prompt is None:
        messages = messages_of(row, find_named_column(row, MESSAGES) if whole else column)
        if messages[-1]["role"] != "assistant":
            raise row.wrong(
                find_named_column(row, MESSAGES), "its last message is no answer that a label could judge", "Remove that message"
            )
        if len(messages) == 1:
            # axolotl's chatml.argilla_chat has the prompt of its judged answers in `chosen`
            names = {"prompt": "chosen" if "chosen" in row.values else "NAME"}
            place = find_named_column(row, MESSAGES) if whole else column
            raise ColumnError(
                f"{row.name}, column {place!r}: an answer is all that it holds, without a prompt",
                remedy=f"Name the column of the prompt: {as_keys(names)}",
                key=KEY,
            )
        messages = with_system(row, system_of(row), messages)
        example: Half = conversation_of(row, messages, len(messages) - 1)
    else:
        example = answer(row, prompt, column, has_template=has_template)
    if isinstance(example, PlainText):
        _refuse_blank(row, column, example.text[example.response_start :])
        return example, label
    return _answering(row, column, example), label


def find_named_column(row: Row, names: Sequence[str]) -> str:
    """Return the first of these columns that the row has, else the first name."""
    return next((name for name in names if row.values.get(name) is not None), names[0])


def _label(row: Row) -> bool:
    column = find_named_column(row, LABELS)
    value = row.values.get(column)
    if isinstance(value, str):
        value = _LABEL_VALUES.get(value.strip().lower(), value)
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise row.wrong(
        column, f"{value!r} is neither true nor false", "Store true (or 1) for wanted and false (or 0) for unwanted answers"
    )


def _require_answer(row: Row, columns: Sequence[str]) -> Any:
    column = find_named_column(row, columns)
    value = row.values.get(column)
    if value is None:
        raise row.wrong(column, f"there is no {columns[0]} answer", "Give the row both answers, or leave it out")
    if isinstance(value, str):
        _refuse_blank(row, column, value)
    elif isinstance(value, list | tuple) and not value:
        raise row.wrong(column, f"the {columns[0]} answer is empty", "Give the row both answers, or leave it out")
    return value


def _refuse_blank(row: Row, column: str, answer: str) -> None:
    if not answer.strip():
        raise row.wrong(column, "the answer is empty", "Give it a text, or leave the row out")


def _texts(row: Row, texts: Sequence[str], starts: Sequence[int]) -> tuple[PlainText, PlainText]:
    for column, text, start in zip(HALVES, texts, starts, strict=True):
        _refuse_blank(row, column, text[start:])
    chosen, rejected = (PlainText(text, start) for text, start in zip(texts, starts, strict=True))
    return chosen, rejected


def _count_shared_characters(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin and that are their prompt: TRL's rule (`trl.data_utils.extract_prompt`).

    A space at its end belongs to the answers, as tokens begin with their space. Where one text begins with all of the other, the last character
    of the shorter one belongs to the answers, so that neither is empty. Which tokens are the prompt is decided when both are tokenized.
    """
    shorter = min(len(one), len(other))
    end = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    if end == shorter or one[end - 1 : end] == " ":
        return max(0, end - 1)
    return end


def _word_end(texts: Sequence[str], start: int) -> int:
    """Return the last place up to `start` that cuts no word of either text in two, in scripts that put spaces between words."""
    while start and any(_is_of_word(text[start - 1 : start]) and _is_of_word(text[start : start + 1]) for text in texts):
        start -= 1
    return start


def _is_of_word(character: str) -> bool:
    # letters without upper and lower case (Lo) are those of scripts that mostly have no spaces, such as Chinese, Japanese and Thai
    return bool(character) and category(character) in ("Lu", "Ll", "Lt", "Lm", "Mn", "Nd", "Pc")


def _hh(row: Row, texts: Sequence[str], *, has_template: bool) -> tuple[Half, Half]:
    turns = [list(_HH_TURN.finditer(text)) for text in texts]
    dialogues = []
    for text, turns_of_text in zip(texts, turns, strict=True):
        ends = [turn.start() for turn in turns_of_text[1:]] + [len(text)]
        dialogues.append(
            [
                {"role": _HH_ROLES[turn.group(1)], "content": text[turn.end() : end].strip()}
                for turn, end in zip(turns_of_text, ends, strict=True)
            ]
        )
    if has_template:
        return _conversations(row, dialogues, None)
    first = _first_difference(row, dialogues)
    ends = [turns_of_text[first].end() for turns_of_text in turns]
    prompt = texts[0][: ends[0]]  # white space around messages may differ, and means nothing
    return _texts(row, [prompt + text[end:] for text, end in zip(texts, ends, strict=True)], [len(prompt)] * 2)


def _conversations(row: Row, halves: Sequence[list[Message]], prompt: Prompt | None) -> tuple[Conversation, Conversation]:
    """Return both halves with their prompt. A prompt as text, where the halves have it, as in UltraFeedback, is not put before them again."""
    before: list[Message] = []
    if prompt is None or (prompt.is_text and not all(half[0]["role"] == "assistant" for half in halves)):
        system = system_of(row) if prompt is None else prompt.system
        halves = [with_system(row, system, half) for half in halves]
    else:
        before = prompt.messages(row)
        if prompt.column in MESSAGES and before[-1]["role"] == "assistant":
            raise row.wrong(
                prompt.column, "its last message is an answer, and the chosen and the rejected one come after it", _SAME
            )
        repeated = next((known for known in (before, prompt.content) if all(_begins(half, known) for half in halves)), ())
        halves = [half[len(repeated) :] for half in halves]
    whole = [[dict(message) for message in [*before, *half]] for half in halves]
    first = len(before) or _first_difference(row, whole)
    conversations = [conversation_of(row, messages, first) for messages in whole]
    chosen, rejected = (_answering(row, column, half) for column, half in zip(HALVES, conversations, strict=True))
    if chosen.messages == rejected.messages:
        raise row.wrong("rejected", "it is equal to the chosen answer", "Leave the row out: it prefers nothing")
    return chosen, rejected


def _begins(half: Sequence[Message], messages: Sequence[Message] | str) -> bool:
    """Return True if the half begins with these messages, whatever keys without a value they have."""
    return not isinstance(messages, str) and [_is_filled(message) for message in half[: len(messages)]] == list(
        map(_is_filled, messages)
    )


def _is_filled(message: Message) -> Message:
    return {key: value for key, value in message.items() if value is not None}


def _first_difference(row: Row, halves: Sequence[Sequence[Message]]) -> int:
    """Return the place of the first message that differs, which must be an answer in both halves."""
    chosen, rejected = halves
    shorter = min(len(chosen), len(rejected))
    first = next((place for place in range(shorter) if chosen[place] != rejected[place]), shorter)
    if first == shorter:
        if len(chosen) == len(rejected):
            raise row.wrong("rejected", "it is equal to the chosen answer", "Leave the row out: it prefers nothing")
        column = HALVES[int(len(rejected) < len(chosen))]
        raise row.wrong(column, f"there is no {column} answer: the other half begins with all of its messages", _SAME)
    roles = [half[first]["role"] for half in halves]
    if first == 0 or roles != ["assistant", "assistant"]:
        raise row.wrong(
            "rejected", f"message {first} differs from the chosen half's, and is no answer: the prompts are different", _SAME
        )
    return first


def _has_image(message: Message) -> bool:
    content = message["content"]
    return not isinstance(content, str) and any(part["type"] != "text" for part in content)


def _answering(row: Row, column: str, half: Conversation) -> Conversation:
    """Return the half with loss on every assistant turn of its answer, except where a message itself says otherwise."""
    if any(_has_image(message) for message in half.messages[half.first_reply :]):
        raise row.wrong(
            column, "its answer holds an image, and the images of a preference are those of its prompt", "Leave the row out"
        )
    turns = [i for i, message in enumerate(half.messages) if message["role"] == "assistant" and i >= half.first_reply]
    for i in turns:
        message = half.messages[i]
        if isinstance(message["content"], str) and not message.get("tool_calls"):
            _refuse_blank(row, column, message["content"] or str(message.get("reasoning_content") or ""))
    return evolve(half, carries=dict.fromkeys(turns, 1.0) | dict(half.carries))
