"""Rows of answers of several steps, each of which was judged: stepwise supervision, for process reward models."""

from typing import Final

from attrs import evolve, frozen

from skyrl_engine.data.sources.questions import find_prompt
from skyrl_engine.data.sources.rows import Row, kind_of
from skyrl_engine.data.text.messages import Conversation, conversation_of
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.data.text.template_rule import answer_messages

STEPS: Final = ("completions", "labels")
"""Columns of stepwise supervision, as TRL and axolotl have them."""


@frozen
class Steps:
    """A prompt, the steps of an answer to it, and True for each step that is right."""

    prompt: Conversation | PlainText
    steps: tuple[str, ...]
    labels: tuple[bool, ...]


def steps_of(row: Row, has_template: bool) -> Steps:
    """Return the steps of a row; without a prompt they stand alone. Raises DataError naming the row for steps and labels that do not match."""
    steps, labels = (row.values.get(name) for name in STEPS)
    if not isinstance(steps, list | tuple) or not steps or not all(isinstance(step, str) and step for step in steps):
        found = kind_of(steps)
        if isinstance(steps, list | tuple):
            others = [place for place, step in enumerate(steps) if not isinstance(step, str) or not step]
            found = f"one whose step {others[0]} is {steps[others[0]]!r}" if others else "an empty list"
        raise row.wrong(
            "completions",
            f"a list of texts is needed, none of them empty, not {found}",
            "Store the steps of an answer as a list of texts, and leave out empty steps with their labels",
        )
    if not isinstance(labels, list | tuple) or len(labels) != len(steps):
        count = len(labels) if isinstance(labels, list | tuple) else kind_of(labels)
        raise row.wrong("labels", f"there are {len(steps)} steps, and {count} labels", "Store true or false for each step")
    wrong = [label for label in labels if type(label) not in (bool, int) or label not in (0, 1)]
    if wrong:
        raise row.wrong("labels", f"a label is {wrong[0]!r}, neither true nor false", "Store true or false for each step")
    prompt = find_prompt(row)
    before: Conversation | PlainText
    if prompt is None:
        before = PlainText("")
    elif prompt.is_text and not has_template:
        before = PlainText(prompt.text())
    else:
        messages = prompt.messages(row)
        answered = conversation_of(row, [*messages, *answer_messages("")], first_reply=len(messages))
        before = evolve(answered, messages=answered.messages[:-1])
    return Steps(before, tuple(steps), tuple(bool(label) for label in labels))
