"""Prompts are checked before anything is sampled: form, keys, length, vocabulary."""

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rl_runs import Rl, steps_of

from skyrl_engine.contracts.kinds.environment import EnvironmentClaims, Task
from skyrl_engine.errors import DataError, EngineError, RolloutError, UnsupportedError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.rl import prompts
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.training.rl.prompts import PromptLimits, check_prompts
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.rl.tasks import TaskOrder


def make_task(key: str, words: int = 1) -> Task:
    return Task(key, messages=({"role": "user", "content": "go " * words},))


def procedure(*tasks: Task) -> Any:
    product = SimpleNamespace(tasks=lambda _split: tasks, claims=EnvironmentClaims())
    return BoundPlugin(product, Owner("environment mine", "Correct it"), "environments[0]", "mine")


def check_tasks(*tasks: Task, failures: float = 0.1, tokens: int = 40) -> None:
    renderer = ChatRenderer(TEMPLATES["chatml"].tokenizer())
    check_prompts([procedure(*tasks)], [(0, task) for task in tasks], renderer, PromptLimits(tokens, 1000, failures))


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        (Task("b"), DataError, "task 'b' has neither messages nor prompt_ids"),
        (Task("b", messages=make_task("b").messages, prompt_ids=(1,)), DataError, "task 'b' has both messages and prompt_ids"),
        (make_task("a"), DataError, "task 'a' is there twice"),
        (Task("b", prompt_ids=(1, 1000)), DataError, "task 'b' has the token id 1000, and the model's vocabulary has 1,000"),
        (Task("b", prompt_ids=(-1, 5)), DataError, "has the token id -1"),
        (
            Task("b", prompt_ids=(1,), data={"seen": {1}}),
            RolloutError,
            "task 'b': what it holds cannot be sent .* set is no JSON value",
        ),
        (Task("b", prompt_ids=(1,), data={"at": math.nan}), RolloutError, "task 'b': what it holds cannot be sent"),
        (Task("b", prompt_ids=(1,), images=("x.png",)), UnsupportedError, "task 'b' has images"),
    ],
)
def test_a_wrong_task_is_named(task: Task, error: type[EngineError], words: str) -> None:
    check_tasks(make_task("a"), Task("ids", prompt_ids=(0, 999)))
    with pytest.raises(error, match=words) as caught:
        check_tasks(make_task("a"), task)
    assert caught.value.remedy


def test_prompts_of_a_procedure_may_be_too_long_as_often_as_attempts_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [make_task(str(number), 1 + 90 * (number == 3)) for number in range(10)]
    with caplog.at_level(logging.WARNING):
        check_tasks(*tasks, failures=0.1)
    words = (
        r"environment mine: 1 of 10 tasks have a prompt of more than rl\.max_prompt_tokens = 40 tokens; that of task '3' has \d+"
    )
    assert "attempts at such tasks fail" in caplog.text
    with pytest.raises(DataError, match=words) as caught:
        check_tasks(*tasks, failures=0.09)
    assert "or leave such tasks out" in caught.value.remedy


def test_tasks_are_those_of_the_first_groups_each_once() -> None:
    parts = [procedure(*(make_task(str(number)) for number in range(size))) for size in (5, 40)]
    order = TaskOrder(parts, [1.0, 3.0], seed=1)
    tickets = [(number, task.key) for number, task in map(order.of, range(30))]
    once = list(dict.fromkeys(tickets))
    assert len(tickets) > len(once), "some tasks are attempted again"
    few = [(number, task.key) for number, task in order.first(30, [3, 100])]
    left_out = [group for group in once if group[0] == 0][3:]
    assert few == [group for group in once if group not in left_out]
    assert left_out


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A function environment over a file whose last row is too long."""
    rows = [{"prompt": "go"}] * 8 + [{"prompt": "go " * 200}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def score(text, task):\n    return len(text) % 5\n")
    return f"environments=[{{use='function', reward='{tmp_path}/reward.py:score', data='{tmp_path}/tasks.jsonl'}}]"


def test_a_row_that_is_too_long_is_refused_while_planning(rl: Rl, table: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"1 of 9 tasks have a prompt of more than rl.max_prompt_tokens = 64 .* task '8' has"
    ) as caught:
        prepare(rl("run", table, "rl.steps=3"))
    assert "Raise rl.max_prompt_tokens to" in caught.value.remedy
    held_out = table.replace("data='", f"data='{tmp_path}/few.jsonl', eval_data='")
    (tmp_path / "few.jsonl").write_text(json.dumps({"prompt": "go"}) + "\n")
    with pytest.raises(DataError, match="that of task 'eval/8' has"):
        prepare(rl("held out", held_out, "evaluation.at_end=true"))


def test_what_planning_did_not_see_fails_its_attempts_and_ends_nothing(
    rl: Rl, table: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompts, "OF_TABLES", 0)
    with caplog.at_level(logging.INFO):
        result = run_rl(rl("run", table, "rl.steps=3"))
    assert result.step == 3
    assert "task '8' of environment function has a prompt of" in caplog.text
    assert max(record["metrics"]["rollout/failed"] for record in steps_of(result.directory)) > 0
