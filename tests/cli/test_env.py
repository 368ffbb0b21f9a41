"""`env list`, `env show` and `env try`."""

import io
import json

import pytest

REWARD = """
from skyrl_engine.contracts import StepResult

def score(text, task):
    return float(text.strip() == str(task.data["answer"]))

def short(text, task):
    return -0.25 * (len(text) > 3)

def broken(text, task):
    return float("nan")

def raising(text, task):
    raise KeyError("cut \\ud83d")

def leaving(text, task):
    raise SystemExit(3)
"""

PLUGIN = """
from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task

class Episode:
    def begin(self):
        return ({"role": "user", "content": "Ready?"},)
    async def step(self, action):
        if action.turn == 0:
            return StepResult(0.25, done=False, messages=({"role": "user", "content": "Sure?"},))
        return StepResult(0.5, metrics={"length": len(action.text)}, success=True)
    def close(self):
        pass

class Asks:
    claims = EnvironmentClaims(max_turns=2, version="7")
    def tasks(self, split):
        return [Task("first", prompt_ids=(1, 2), data={"hidden": "ja"})] if split == "train" else []
    def open(self, task, seed):
        return Episode()
    def solve(self, task):
        return ("yes", "sure")

class TaughtEpisode(Episode):
    async def step(self, action):
        return StepResult(0.5, columns={"teacher_logprobs": [-0.5] * len(action.token_ids)})

class Taught(Asks):
    claims = EnvironmentClaims(columns=("teacher_logprobs",))
    def open(self, task, seed):
        return TaughtEpisode()

class Wrong(Asks):
    def tasks(self, split):
        return [{"prompt": "go"}] if split == "train" else 1 / 0

class Empty(Asks):
    def tasks(self, split):
        return []

class Unsendable(Asks):
    def tasks(self, split):
        return [Task("set", prompt_ids=(1,), data={"seen": {1}})]

class Plugin:
    def __init__(self, made):
        self.made = made
    @hookimpl
    def skyrl_engine_make_environment(self):
        return self.made()

asks, wrong, empty, unsendable, taught = map(Plugin, (Asks, Wrong, Empty, Unsendable, Taught))
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "r.py").write_text(REWARD)
    (tmp_path / "asks.py").write_text(PLUGIN)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "What is 2 + 2?", "answer": 4}\n{"prompt": "What is 3 + 4?", "answer": 7}\n')
    return tmp_path


SUMS = ("function", "--set", "data=tasks.jsonl", "--set")


def test_list_names_what_is_installed_and_imports_nothing(command):
    rows = json.loads(command("env", "list", "--json").out)
    assert {"function", "reasoning_gym", "gymnasium"} <= {row["name"] for row in rows}
    assert "skyrl-engine-environments" in command("env", "list").out


def test_show_tells_claims_sizes_and_the_first_task(command, files):
    facts = json.loads(command("env", "show", *SUMS, "reward=./r.py:score", "--set", "eval_fraction=0.5", "--json").out)
    assert (facts["max_turns"], facts["tasks"], facts["held_out"], facts["solutions"]) == (1, 1, 1, False)
    assert facts["first_task"]["messages"][0]["content"].startswith("What is")
    shown = command("env", "show", "./asks.py:asks").out
    for words in ("max turns", "version", "tokens: 1 2", 'data: {"hidden": "ja"}'):
        assert words in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [("empty", "has no task. Check"), ("unsendable", "task 'set': what it holds cannot be sent to the environment's process")],
)
def test_show_refuses_tasks_that_no_run_could_attempt(command, files, name, words):
    outcome = command("env", "show", f"./asks.py:{name}")
    assert (outcome.code, words in outcome.last_line) == (4, True)


def test_try_pays_for_an_answer(command, files):
    for answer, reward, success in (("4", "1", "yes"), ("5", "0", "no")):
        lines = command("env", "try", *SUMS, "reward=./r.py:score", "--answer", answer).out.splitlines()
        assert "user: What is 2 + 2?" in lines
        assert f"assistant: {answer}" in lines
        assert [line.split() for line in lines[-2:]] == [["reward", reward], ["success", success]]


def test_try_reads_an_answer_of_many_lines_from_stdin(command, files, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("4\nü\n".encode()), encoding="utf-8"))
    outcome = command("env", "try", "./asks.py:asks", "--answer", "-", "--answer", "sure", "--json")
    assert outcome.code == 0, outcome.err
    transcript = json.loads(outcome.out)
    assert [turn["said"] for turn in transcript["turns"]] == ["4\nü", "sure"]


def test_try_reads_stdin_once(command, files):
    outcome = command("env", "try", "./asks.py:asks", "--answer", "-", "--answer", "-")
    assert outcome.code == 2
    assert "Give --answer - once" in outcome.err


def test_try_shows_the_parts_of_a_reward(command, files):
    transcript = json.loads(
        command("env", "try", *SUMS, 'reward=["./r.py:score", "./r.py:short"]', "--task", "1", "--answer", "7   ", "--json").out
    )
    assert transcript["task"]["messages"][0]["content"] == "What is 3 + 4?"
    assert transcript["reward"] == 0.75
    assert transcript["turns"][0]["result"]["parts"] == {"score": 1.0, "short": -0.25}


LIGHT = """
import gymnasium


class Light(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return "the light is red", {}

    def step(self, action):
        return "it is green", 1.0, True, False, {}
"""


def test_show_tells_the_first_observation_too(command, tmp_path):
    """An environment may begin with a message of its own after the task's: gymnasium does, where a system prompt comes before it."""
    (tmp_path / "light.py").write_text(LIGHT)
    for settings in (("system_prompt=Play {id}.",), ()):
        line = ("env", "show", "gymnasium:./light.py:Light", *(part for each in settings for part in ("--set", each)))
        shown = json.loads(command(*line, "--json").out)
        content = [each["content"] for each in (*shown["first_task"]["messages"], *shown["begin"])]
        assert sum("the light is red" in text for text in content) == 1
        assert command(*line).out.count("the light is red") == 1


def test_show_and_try_name_the_numbers_per_token(command, files):
    assert ["columns", "teacher_logprobs"] in [line.split() for line in command("env", "show", "./asks.py:taught").out.splitlines()]
    assert "column teacher_logprobs  [-0.5, -0.5]" in command("env", "try", "./asks.py:taught", "--answer", "no").out


def test_try_takes_turns_and_knows_solutions(command, files):
    transcript = json.loads(command("env", "try", "./asks.py:asks", "--json").out)
    assert [turn["said"] for turn in transcript["turns"]] == ["yes", "sure"]
    assert (transcript["begin"][0]["content"], transcript["reward"], transcript["success"]) == ("Ready?", 0.75, True)
    answer = command("env", "try", "./asks.py:asks", "--answer", "no").out
    assert answer.count("assistant: no") == 2
    assert "length" in answer


def test_try_calls_a_tool_in_whichever_way_it_is_written(command, files):
    (files / "tools.py").write_text('def add(a: int, b: int) -> int:\n    """Add two numbers."""\n    return a + b\n')
    table = (*SUMS, "reward=./r.py:score", "--set", 'tools=["./tools.py:add"]')
    calls = (
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>',
        "<function=add><parameter=a>2</parameter><parameter=b>2</parameter></function>",
    )
    for call in calls:
        shown = command("env", "try", *table, "--answer", call, "--answer", "4").out
        assert 'calls add: {"a": 2, "b": 2}' in shown
        assert "tool: 4" in shown
        assert shown.rstrip().endswith("yes")
    transcript = json.loads(command("env", "try", *table, "--answer", calls[0], "--answer", "<tool_call>{oh", "--json").out)
    assert transcript["turns"][0]["tool_calls"] == [{"name": "add", "arguments": {"a": 2, "b": 2}}]
    assert "is not closed" in transcript["turns"][1]["tool_problem"]


def test_a_task_of_reasoning_gym_by_its_short_name(command):
    transcript = json.loads(command("env", "try", "reasoning_gym:spell_backward", "--json").out)
    assert transcript["reward"] == 1.0
    assert transcript["task"]["key"] == "spell_backward/train/0"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("try", "nowhere"), 3, "nowhere"),
        (("try", *SUMS, "reward=./r.py:score"), 2, "knows no solution of this task. Give --answer TEXT"),
        (("try", *SUMS, "reward=./r.py:score", "--task", "9", "--answer", "4"), 2, "There is no task 9: train has 2"),
        (("try", *SUMS, "reward=./r.py:broken", "--answer", "4"), 3, "the reward broken returned nan"),
        (
            ("try", *SUMS, "reward=./r.py:raising", "--answer", "4"),
            4,
            "in raising\nerror: function, task '0': KeyError: 'cut \\ud83d'. ",
        ),
        (("try", *SUMS, "reward=./r.py:leaving", "--answer", "4"), 4, "in leaving\nerror: function, task '0': SystemExit: 3. "),
        (("try", *SUMS, "reward=./r.py:missing", "--answer", "4"), 4, "has no function 'missing'"),
        (("try", "./asks.py:wrong", "--answer", "4"), 3, "has dict as task 0. Return a skyrl_engine.contracts.Task"),
        (("show", "./asks.py:wrong"), 3, "failed in tasks('eval'): ZeroDivisionError: division by zero. Correct "),
        (("show", "function", "--set", "reward=./r.py:score"), 2, "Give --set data=VALUE"),
        (("show", "function", "--set", "data"), 2, "is not an override"),
        (("show", "function", "--set", "dat=tasks.jsonl"), 2, "dat"),
    ],
)
def test_what_cannot_be_done_is_said(command, files, arguments, code, words):
    outcome = command("env", *arguments)
    assert outcome.code == code, outcome.err
    assert words in outcome.err
