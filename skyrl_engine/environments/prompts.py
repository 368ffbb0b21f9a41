"""The prompt around a task: a system prompt before it, a template for its text."""

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from skyrl_engine.contracts.kinds.environment import Message
from skyrl_engine.data.text.template_rule import prompt_messages

_PLACE = "{prompt}"


def _holds_place(_instance: object, attribute: Any, value: str | None) -> None:
    if value is not None and _PLACE not in value:
        raise ValueError(f"'{attribute.name}' must hold {_PLACE}, where the task's text goes")


@frozen
class PromptOptions:
    """Options that every environment of ours has."""

    system_prompt: str | None = field(default=None, kw_only=True)
    """Text of a system message before every task that has none; none: no message."""

    prompt_template: str | None = field(default=None, kw_only=True, validator=_holds_place)
    """Text around that of a task, which stands where `{prompt}` is; none: the task's text alone."""

    def messages(self, prompt: "str | Sequence[Message]") -> tuple[Message, ...]:
        """Return the messages of a task whose prompt is a text, or messages already; the template is for the last user message."""
        given = prompt_messages(prompt)
        asked = [number for number, message in enumerate(given) if message.get("role") == "user"]
        if self.prompt_template is not None and asked and isinstance(given[asked[-1]].get("content"), str):
            last = given[asked[-1]]
            given[asked[-1]] = {**last, "content": self.prompt_template.replace(_PLACE, last["content"])}
        if self.system_prompt is not None and not any(message.get("role") == "system" for message in given):
            given.insert(0, {"role": "system", "content": self.system_prompt})
        return tuple(given)
