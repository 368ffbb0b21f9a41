"""The prompt of a row: a text or messages, with the system message and the earlier rounds, which have columns of their own."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from skyrl_engine.data.sources.rows import Row, kind_of
from skyrl_engine.data.text.messages import Conversation, Message, conversation_of, messages_of
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.data.text.template_rule import answer_messages, prompt_messages

MESSAGES: Final = ("messages", "conversations")
SYSTEM: Final = ("system", "system_prompt")
HISTORY: Final = "history"
PROMPTS: Final = ("prompt", *MESSAGES, "instruction", "question", "input")
"""Columns that hold a prompt, the first of them that a row has; `input` continues an `instruction`."""
INSTRUCTIONS: Final = ("instruction", "INSTRUCTION")
"""Names of a column that holds an instruction; those of Open Assistant's data are in capitals."""
PASSAGES: Final = ("context", "article")
"""Columns that hold a text which a `question` is about."""


@frozen
class Prompt:
    """A prompt: `content` is its last part, a text or messages; before it come earlier `rounds` of questions and answers.

    `column` is the column of `content`. `context` continues an instruction, a question is about the text of `passage`.
    """

    column: str
    content: str | Sequence[Message]
    context: str = ""
    passage: str = ""
    system: str | None = None
    rounds: tuple[tuple[str, str], ...] = ()

    @property
    def is_text(self) -> bool:
        return isinstance(self.content, str)

    def messages(self, row: Row) -> list[Message]:
        """Return the prompt as messages, a text as what the user says. Raises DataError for two system messages that differ."""
        if isinstance(self.content, str):
            last = prompt_messages("\n\n".join(part for part in (self.passage, self.content, self.context) if part))
        else:
            last = list(self.content)
        rounds = [
            message for question, answered in self.rounds for message in (*prompt_messages(question), *answer_messages(answered))
        ]
        return with_system(row, self.system, [*rounds, *last])

    def text(self) -> str:
        """Return a prompt of texts as it stands before an answer where there is no chat template.

        A column `prompt` is taken to the letter; instructions get headings, as in Alpaca, and other questions are followed by an empty line.
        """
        assert isinstance(self.content, str), "messages need a chat template"
        system = f"{self.system}\n\n" if self.system else ""
        if self.column in INSTRUCTIONS:
            earlier = "".join(f"{_instruction(question)}{answered}\n\n" for question, answered in self.rounds)
            return f"{system}{earlier}{_instruction(self.content, self.context)}"
        ending = "" if self.column == "prompt" else "\n\n"
        earlier = "".join(f"{question}{ending}{answered}\n\n" for question, answered in self.rounds)
        passage = f"{self.passage}\n\n" if self.passage else ""
        return f"{system}{earlier}{passage}{self.content}{ending}"


def find_prompt(row: Row, columns: Sequence[str] = PROMPTS) -> Prompt | None:
    """Return the prompt in the first of `columns` that the row has, None where it has none. Raises DataError for what is neither text nor
    messages.
    """
    column = next((name for name in columns if row.values.get(name) is not None), None)
    if column is None:
        return None
    value = row.values[column]
    content: str | list[Message]
    if isinstance(value, str) and column not in MESSAGES:
        content = value
    elif column in (*INSTRUCTIONS, "question", "article", "message_1"):
        raise row.wrong(column, f"a string is needed, not {kind_of(value)}", "Store text in this column")
    else:
        content = messages_of(row, column)
    context = optional_text(row, "input") if column in INSTRUCTIONS else ""
    passages = (optional_text(row, name) for name in PASSAGES if column == "question")
    passage = next((text for text in passages if text), "")
    return Prompt(column, content, context, passage, system_of(row), rounds_of(row))


def answer(row: Row, prompt: Prompt, column: str, *, has_template: bool, rounds_count: bool = False) -> Conversation | PlainText:
    """Return the prompt with the answer in `column`: as it stands where both are texts and there is no template.

    Loss falls on the answer alone, or, with `data.loss_on = "all"`, on those of earlier rounds too where `rounds_count`. Raises DataError
    naming the row and the column.
    """
    reply = row.values.get(column)
    if isinstance(reply, str) and prompt.is_text and not has_template:
        before = prompt.text()
        return PlainText(before + reply, len(before))
    if not isinstance(reply, str | list | tuple | Mapping):
        raise row.wrong(column, f"a string is needed, not {kind_of(reply)}", "Store text in this column, or messages")
    before_messages = prompt.messages(row)
    after = answer_messages(reply) if isinstance(reply, str) else messages_of(row, column, single=True)
    first_reply = 0 if rounds_count else len(before_messages)
    return conversation_of(row, [*before_messages, *after], first_reply=first_reply)


def system_of(row: Row) -> str | None:
    """Return the system message in a column of its own, None where there is none. Raises DataError for what is no text."""
    return next((text for text in (optional_text(row, name) for name in SYSTEM) if text), None)


def with_system(row: Row, system: str | None, messages: list[Message]) -> list[Message]:
    """Return the messages after a system message, unless they begin with the same. Raises DataError where they begin with another."""
    if system is None:
        return messages
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise row.wrong(
                "system", "the messages begin with another system message", "Keep one of them, in the messages or in the column"
            )
        return messages
    return [{"role": "system", "content": system}, *messages]


def rounds_of(row: Row) -> tuple[tuple[str, str], ...]:
    """Return the earlier rounds in the column `history`, pairs of a question and its answer. Raises DataError for what is none."""
    rounds = row.values.get(HISTORY)
    if rounds is None or (isinstance(rounds, list | tuple) and not rounds):
        return ()
    if not isinstance(rounds, list | tuple) or not all(_is_round(value) for value in rounds):
        raise row.wrong(
            HISTORY,
            "a list of pairs of texts is needed, each a question and its answer",
            "Store [[question, answer], ...], or remove the column",
        )
    return tuple((question, answered) for question, answered in rounds)


def optional_text(row: Row, column: str) -> str:
    """Return the text of a column, "" where the row has none. Raises DataError for what is no text."""
    value = row.values.get(column)
    if value is not None and not isinstance(value, str):
        raise row.wrong(column, f"a string is needed, not {kind_of(value)}", "Store text in this column")
    return value or ""


def _is_round(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _instruction(instruction: str, context: str = "") -> str:
    section = f"### Input:\n{context}\n\n" if context else ""
    return f"### Instruction:\n{instruction}\n\n{section}### Response:\n"
