"""Rewards that compare the attempts of a group: what the function sees, where its numbers go, and what becomes of a group that it fails."""

import asyncio
import json
from pathlib import Path

import pytest
from rl_runs import Rl, Seen, steps_of

from skyrl_engine import group_reward
from skyrl_engine.contracts import Task
from skyrl_engine.contracts.kinds.environment import EndedAttempt, EnvironmentClaims
from skyrl_engine.environments import TableOptions, function_of, make_weighted_reward
from skyrl_engine.errors import ConfigError, ContractError, RolloutError
from skyrl_engine.rollout.journal_index import read_index
from skyrl_engine.testing.kit import promises_of
from skyrl_engine.testing.subject import Subject, select_plugin
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.training.rl.run import run_rl

JUDGES = """
import hashlib
from skyrl_engine import group_reward
from skyrl_engine.contracts import StepResult

def value(text):
    return int(hashlib.sha256(text.encode(errors="replace")).hexdigest()[:6], 16) / 2**24

@group_reward()
async def ranked(texts, task):
    assert isinstance(texts, list) and task.messages[0]["role"] == "user"
    values = [value(text) for text in texts]
    return [StepResult(float(sum(other < own for other in values)), metrics={"seen": len(texts)}, info={"text": text})
            for own, text in zip(values, texts)]

@group_reward()
def broken(texts, task):
    return [1.0]
"""


@pytest.fixture
def judged(rl: Rl, tmp_path: Path):
    """`judged("ranked", "key=value", ...)`: the configuration of a run whose rewards come from that function."""
    (tmp_path / "judges.py").write_text(JUDGES)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + {n}"}) + "\n" for n in range(3)))

    def make(name: str, *overrides: str, preset: str = "grpo"):
        environment = f'environments=[{{use="{tmp_path}/judges.py:{name}", data="{tmp_path}/tasks.jsonl"}}]'
        return rl("run", "rl.steps=1", "rl.max_tokens=6", environment, *overrides, preset=preset)

    return make


def test_a_group_is_rewarded_together_and_its_best_attempt_is_chosen(judged, seen: Seen) -> None:
    run = run_rl(judged("ranked", "rl.group_size=4", preset="online_dpo")).directory
    (step,) = steps_of(run)
    namespace: dict = {}
    exec(JUDGES, namespace)
    assert len(seen.groups[1]) == 3
    for group in seen.groups[1]:
        values = [namespace["value"](attempt.info["text"]) for attempt in group.finished]
        assert [attempt.reward for attempt in group.finished] == [sum(other < own for other in values) for own in values]
        assert {attempt.success for attempt in group.finished} == {None}
    assert step["metrics"]["environment/seen/mean"] == 4.0
    assert step["metrics"]["reward/pair_margin"] == pytest.approx(3.0)
    learned = {(own.ticket, own.member): own.advantages[0] for own in read_index(run / "rollouts").learned[1].read_learned()}
    for group in seen.groups[1]:
        ranked = sorted(group.finished, key=lambda attempt: attempt.reward)
        assert (learned[group.ticket, ranked[0].member], learned[group.ticket, ranked[-1].member]) == (-1.0, 1.0)


def test_a_comparison_without_an_answer_fails_the_attempts(judged) -> None:
    with pytest.raises(RolloutError, match=r"compare: a group reward returned \[1.0\] for 3 attempts"):
        run_rl(judged("broken"))


@pytest.mark.parametrize("returned", [{0: 1.0, 1: 0.0}, {1.0, 0.0}, b"ab", [1.0], 1.0, [1.0, float("nan")]])
def test_what_is_no_list_of_one_number_per_text_is_refused(returned: object) -> None:
    """Keys of a mapping and members of a set are numbers, too, and no rewards in the order of the texts."""

    @group_reward()
    def wrong(texts, task):
        return returned

    environment = wrong.skyrl_engine_make_environment(TableOptions(data="tasks.jsonl"))
    task = Task("0", ({"role": "user", "content": "1 + 1"},))
    with pytest.raises(ContractError):
        asyncio.run(environment.compare(task, [EndedAttempt("a", ()), EndedAttempt("b", ())]))


def test_an_order_that_matters_is_claimed_by_what_compares() -> None:
    @group_reward(order_matters=True)
    def first_wins(texts, task):
        return [1.0, *(0.0 for _ in texts[1:])]

    claims = first_wins.skyrl_engine_make_environment(TableOptions(data="tasks.jsonl")).claims
    assert claims == EnvironmentClaims(pass_threshold=None, compares=True, order_matters=True)
    with pytest.raises(ContractError, match="order_matters and not compares"):
        EnvironmentClaims(order_matters=True)


def test_one_attempt_alone_is_refused(judged) -> None:
    with pytest.raises(ConfigError, match=r"rl.group_size: is 1, and environment 'ranked'.* compares the attempts at a task"):
        prepare(judged("ranked", "rl.group_size=1", "rollouts.min_group_size=1", "advantage.use=reinforce_pp"))


@pytest.mark.usefixtures("judged")
def test_its_environment_can_be_pickled(tmp_path: Path) -> None:
    plugin = select_plugin("environment", f"{tmp_path}/judges.py:ranked", {"data": f"{tmp_path}/tasks.jsonl"})
    promise = next(each for each in promises_of("environment") if each.name == "pickling")
    assert promise.hold(Subject.of_plugin(plugin)).status == "kept"


def test_a_group_reward_is_no_reward_of_one_text(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"wrong takes \(text, task\), and a group reward takes \(texts, task\)"):

        @group_reward()
        def wrong(text, task):
            return [1.0]

    @group_reward()
    def better(texts, task):
        return [0.0 for _ in texts]

    with pytest.raises(ContractError, match="better rewards the attempts of a group together"):
        make_weighted_reward(better, "better")
    file = tmp_path / "judges.py"
    file.write_text(
        "from skyrl_engine import group_reward\n\n\n@group_reward()\ndef better(texts, task):\n    return [0.0 for _ in texts]\n"
    )
    with pytest.raises(ContractError, match="better rewards the attempts of a group together"):
        make_weighted_reward(function_of(f"{file}:better"), "better")
