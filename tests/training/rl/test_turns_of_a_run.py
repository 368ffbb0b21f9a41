"""What planning refuses of the turns of a run's environments."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_engine.contracts.kinds.environment import EnvironmentClaims, Task
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.rollout.turns import TurnRenderer
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.rl.preparation import _prove_turns

ASKED = Task("asked", messages=({"role": "user", "content": "how much is 1 + 1?"},))
TOKENS = Task("tokens", prompt_ids=(1, 2, 3))


def prove(task: Task, *, template: str = "chatml", history: Any = "append", max_turns: int = 3) -> None:
    part: Any = SimpleNamespace(label="sums", product=SimpleNamespace(claims=EnvironmentClaims(max_turns=max_turns)))
    tasks: Any = SimpleNamespace(tasks=[[task]])
    _prove_turns(TurnRenderer(TEMPLATES[template].tokenizer(), history=history), [part], tasks)


def test_turns_that_can_be_rendered_are_planned() -> None:
    prove(ASKED)
    prove(TOKENS)
    prove(ASKED, history="template", template="counter")
    prove(ASKED, template="counter", max_turns=1)


def test_a_template_that_cannot_go_on_is_refused_where_there_are_several_turns() -> None:
    with pytest.raises(UnsupportedError, match="the chat template of counter"):
        prove(ASKED, template="counter")


def test_prompts_of_tokens_cannot_be_rendered_anew() -> None:
    with pytest.raises(UnsupportedError, match="sums gives its prompts as tokens") as caught:
        prove(TOKENS, history="template")
    assert 'rl.history = "append"' in caught.value.remedy
    prove(TOKENS, history="template", max_turns=1)
