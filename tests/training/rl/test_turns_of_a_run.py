"""Turns of a run's environments that planning refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from skyrl_engine.contracts.kinds.environment import EnvironmentClaims, Task
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.rl.checks import validate_turns

ASKED = Task("asked", messages=({"role": "user", "content": "how much is 1 + 1?"},))
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
TOKENS = Task("tokens", prompt_ids=(1, 2, 3))


def prove(task: Task, *, template: str = "chatml", history: Any = "append", max_turns: int = 3) -> None:
    product = SimpleNamespace(claims=EnvironmentClaims(max_turns=max_turns))
    part: BoundPlugin[Any] = BoundPlugin(product, Owner("sums", "Correct it"), "environments[0]", "sums")
    tasks: Any = SimpleNamespace(tasks=[[task]])
    validate_turns(ChatRenderer(TEMPLATES[template].tokenizer(), history=history), [part], tasks)


def test_turns_that_can_be_rendered_are_planned() -> None:
    prove(ASKED)
    prove(TOKENS)
    prove(ASKED, history="template", template="counter")
    prove(ASKED, template="counter", max_turns=1)


def test_a_template_that_cannot_go_on_is_refused_where_there_are_several_turns() -> None:
    with pytest.raises(UnsupportedError, match="the chat template of counter"):
        prove(ASKED, template="counter")


def test_tools_that_the_model_would_not_hear_of_are_refused() -> None:
    """With one turn too: a task whose tools are written nowhere is another task."""
    prove(evolve(ASKED, tools=(TOOL,)))
    for turns in (1, 3):
        with pytest.raises(
            UnsupportedError, match=r"the chat template of plain does not tell the model of the tools .*'add'"
        ) as caught:
            prove(evolve(ASKED, tools=(TOOL,)), template="plain", max_turns=turns)
        assert "model.chat_template" in caught.value.remedy


def test_calls_that_nobody_reads_are_warned_of() -> None:
    tokenizer = TEMPLATES["chatml"].tokenizer()
    assert ChatRenderer(tokenizer).validate_template(("tool",), (TOOL,)) == ()
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]")
    (warning,) = ChatRenderer(tokenizer).validate_template(("tool",), (TOOL,))
    assert "writes calls of tools in a way that is not read" in warning


def test_prompts_of_tokens_cannot_be_rendered_anew() -> None:
    with pytest.raises(UnsupportedError, match="sums gives its prompts as tokens") as caught:
        prove(TOKENS, history="template")
    assert 'rl.history = "append"' in caught.value.remedy
    prove(TOKENS, history="template", max_turns=1)
