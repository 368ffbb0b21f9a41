"""`function`: tasks out of tables, functions of several engines as rewards, functions as tools."""

import asyncio
import json
import re
from pathlib import Path

import attrs
import pytest

from skyrl_engine import ContractError, DataError
from skyrl_engine.contracts import Action, FactoryContext, StepResult, Task, ToolCall
from skyrl_engine.environments import TableOptions, function_of, reward
from skyrl_engine.environments.tools import Tool
from skyrl_engine.testing import EnvironmentConformance, select_plugin
from skyrl_engine_environments.function import make
from skyrl_engine_environments.options import FunctionOptions, RewardTable

MATERIAL = Path(__file__).with_name("material")
REWARDS = MATERIAL / "rewards.py"
SUMS = str(MATERIAL / "sums.jsonl")
TASK = Task("a", ({"role": "user", "content": "What is 2 + 2?"},), data={"answer": "4", "ground_truth": "4"})


def rewarding(*names, **options):
    return make(FunctionOptions(data=SUMS, reward=tuple(f"{REWARDS}:{name}" for name in names), **options))


def step(environment, text, *, task=TASK, turn=0, calls=(), problem=None):
    episode = environment.open(task, 0)
    assert tuple(episode.begin()) == ()
    result = asyncio.run(episode.step(Action(text, (1, 2), turn, "stop", tuple(calls), problem)))
    episode.close()
    return result


def written(folder, rows, name="tasks.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def tasks_of(data, split="train", **options):
    return list(make(FunctionOptions(data=data, reward=f"{REWARDS}:exact", **options)).tasks(split))


class Conformance(EnvironmentConformance):
    """The solution of a task stands in its row."""

    def solve(self, task):
        return task.data["answer"]


class TestFunction(Conformance):
    plugin = "skyrl-engine-environments:function"
    options = {"data": SUMS, "eval_fraction": 0.3, "reward": f"{REWARDS}:exact"}  # noqa: RUF012 the suite reads it, nothing changes it


class TestFunctionWithTools(Conformance):
    plugin = "skyrl-engine-environments:function"
    options = {  # noqa: RUF012 the suite reads it, nothing changes it
        "data": SUMS,
        "rewards": ({"use": f"{REWARDS}:later"}, {"use": f"{REWARDS}:of_trl_later", "weight": 0.5}),
        "tools": (f"{REWARDS}:add", f"{REWARDS}:look_up"),
        "max_turns": 3,
    }


class TestDecoratedReward(Conformance):
    """A local file's plugin."""

    plugin = f"{REWARDS}:decorated"
    options = {"data": SUMS}  # noqa: RUF012 the suite reads it, nothing changes it


# --- tasks -------------------------------------------------------------------------------------------------------------------------


def test_rows_become_tasks():
    tasks = tasks_of(SUMS)
    assert [task.key for task in tasks] == ["a", "b", "c", "d", "e", "f"]
    asked = "What is 2 + 2?"
    assert tasks[0] == Task("a", ({"role": "user", "content": asked},), data={"key": "a", "answer": "4"}, prompt_text=asked)
    assert [message["role"] for message in tasks[2].messages] == ["system", "user"]
    assert tasks[2].prompt_text is None


def test_csv_with_columns_of_other_names(tmp_path):
    (tmp_path / "tasks.csv").write_text("question,answer,id\nWhat is 1 + 2?,3,first\nWhat is 2 + 2?,4,second\n")
    tasks = tasks_of(str(tmp_path / "tasks.csv"), map={"prompt": "question"})
    assert [(task.key, task.messages[0]["content"]) for task in tasks] == [
        ("first", "What is 1 + 2?"),
        ("second", "What is 2 + 2?"),
    ]
    assert str(tasks[0].data["answer"]) == "3"


def test_rows_without_a_key_are_numbered_over_all_files(tmp_path):
    files = tuple(written(tmp_path, [{"prompt": "x"}, {"prompt": "y"}], f"{number}.jsonl") for number in range(2))
    assert [task.key for task in tasks_of(files)] == ["0", "1", "2", "3"]


def test_messages_and_tools_may_be_json_texts(tmp_path):
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    row = {"messages": json.dumps([{"role": "user", "content": "x"}]), "tools": json.dumps([schema])}
    assert attrs.asdict(tasks_of(written(tmp_path, [row]))[0]) == attrs.asdict(
        Task("0", ({"role": "user", "content": "x"},), tools=(schema,))
    )


def test_values_are_json(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "x", "limit": NaN, "most": Infinity, "sizes": [1.5, 2], "deep": {"a": [1, null]}}\n')
    (task,) = tasks_of(str(path))
    assert task.data == {"limit": None, "most": "inf", "sizes": [1.5, 2], "deep": {"a": [1, None]}}
    json.dumps(attrs.asdict(task), allow_nan=False)


def test_templates_stand_around_the_last_user_message():
    tasks = tasks_of(SUMS, system_prompt="Be exact.", prompt_template="{prompt} Say {a number}.")
    assert [message["content"] for message in tasks[0].messages] == ["Be exact.", "What is 2 + 2? Say {a number}."]
    assert [message["content"] for message in tasks[2].messages] == ["Answer briefly.", "What is 5 + 5? Say {a number}."]
    with pytest.raises(ValueError, match="'prompt_template' must hold"):
        TableOptions(data=SUMS, prompt_template="Answer:")


def test_a_template_is_for_the_user_where_a_tool_spoke_last(tmp_path):
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": "4"}]
    (task,) = tasks_of(written(tmp_path, [{"messages": messages}]), prompt_template="<{prompt}>")
    assert [message["content"] for message in task.messages] == ["<x>", "4"]


def test_held_out_tasks_are_others(tmp_path):
    rows = written(tmp_path, [{"prompt": f"number {index}"} for index in range(40)])
    train, held_out = (tasks_of(rows, split, eval_fraction=0.25) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (30, 10)
    assert not {task.key for task in train} & {task.key for task in held_out}
    assert [task.key for task in tasks_of(rows, "eval", eval_fraction=0.25)] == [task.key for task in held_out]
    assert [task.key for task in tasks_of(rows, "eval", eval_fraction=0.25, split_seed=1)] != [task.key for task in held_out]
    assert tasks_of(rows, "eval") == []


def test_the_keys_of_two_files_are_kept_apart(tmp_path):
    """Rows of both are numbered from 0."""
    rows = written(tmp_path, [{"prompt": "x"}, {"prompt": "y"}])
    other_rows = written(tmp_path, [{"prompt": "z"}], "eval.jsonl")
    train, held_out = (tasks_of(rows, split, eval_data=other_rows) for split in ("train", "eval"))
    assert ([task.key for task in train], [task.key for task in held_out]) == (["0", "1"], ["eval/0"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "alien", "content": "x"}]}, "a message has the role 'alien'"),
        ({"question": "x"}, r"sample 1 .*2\) has neither prompt nor messages; it has 'question'"),
        ({"prompt": "", "answer": "4"}, "has neither prompt nor messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "has both prompt and messages"),
        ({"prompt": "x", "images": ["a.png"]}, "has images, and tasks with images are not supported yet"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "a message's content is not a text"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "its last message is the assistant's",
        ),
        ({"messages": "[{"}, "column 'messages': its text is no JSON"),
        ({"messages": "[]"}, "a list of {role, content} objects is needed"),
        ({"messages": [{"content": "x"}]}, "a list of {role, content} objects is needed"),
        ({"prompt": 4}, "column 'prompt': a text or a list"),
        ({"prompt": "x", "tools": "add"}, "column 'tools': its text is no JSON"),
        ({"prompt": "x", "tools": ["add"]}, r"a list of {type, function} objects is needed"),
        ({"key": "a", "prompt": "x"}, "two tasks have the key 'a': number 1 and number 2 of train"),
    ],
)
def test_a_row_that_is_no_task_is_named(tmp_path, row, words):
    data = written(tmp_path, [{"key": "a", "prompt": "first"}, row])
    with pytest.raises(DataError, match=words):
        tasks_of(data)


# --- rewards -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("exact", "later", "tensor", "of_lists", "of_lists_later", "of_trl", "of_trl_later", "of_trl_tensor"),
        *("of_verl", "of_verl_briefly", "of_verl_later", "decorated"),
    ],
)
def test_functions_of_every_form(name):
    environment = rewarding(name)
    assert [step(environment, text).reward for text in ("4", "5")] == [1.0, 0.0]


def test_a_form_may_be_named():
    with pytest.raises(ContractError, match=r"the reward 'of_nobody' takes \(samples\)"):
        rewarding("of_nobody", form="skyrl_engine")
    assert step(rewarding("of_verl", form="verl"), "4").reward == 1.0


def test_a_reward_may_say_more():
    result = step(rewarding("explained"), "5")
    assert result == StepResult(0.0, metrics={"length": 1}, success=True, info={"due": "4"})


def test_a_reward_of_lists_may_say_more():
    assert step(rewarding("of_lists_explained"), "4") == step(rewarding("explained"), "4")


def test_a_decorated_reward_of_lists_is_a_plugin():
    environment = select_plugin("environment", f"{REWARDS}:decorated_lists", {"data": SUMS}).make(FactoryContext(1, 0, 64))
    assert [step(environment, text).reward for text in ("4", "5")] == [1.0, 0.0]


def test_a_reward_with_options_is_an_environment_of_its_own(tmp_path):
    """In a list of rewards nobody could set its options."""
    file = tmp_path / "r.py"
    file.write_text(
        "from skyrl_engine import reward\n"
        "@reward()\ndef score(text, task, config): return 0.5\n"
        "@reward()\ndef own(text, task, config=None): return 0.25\n"
    )
    with pytest.raises(DataError, match=r"the reward score of .* has options of its own") as caught:
        function_of(f"{file}:score")
    assert f"--env {file}:score" in caught.value.remedy
    assert function_of(f"{file}:own")("", None) == 0.25
    with pytest.raises(TypeError, match=r"extends skyrl_engine\.environments\.TableOptions"):
        reward(config=dict)


def test_a_decorator_refuses_other_parameters():
    with pytest.raises(TypeError, match=r"takes \(text, task\), and a reward with batch=True takes \(texts, tasks\)"):
        reward(batch=True)(function_of(f"{REWARDS}:exact"))
    with pytest.raises(TypeError, match=r"takes \(texts, tasks\), and a reward takes \(text, task\)"):
        reward()(function_of(f"{REWARDS}:of_lists"))


def test_rewards_are_added_by_their_weights_and_shown():
    tables = (RewardTable(f"{REWARDS}:exact"), RewardTable(f"{REWARDS}:short", -0.5))
    result = step(make(FunctionOptions(data=SUMS, rewards=tables)), "4")
    assert (result.reward, result.parts) == (0.75, {"exact": 1.0, "short": -0.25})
    assert step(rewarding("exact", "short"), "4").reward == 1.5


def test_a_function_of_trl_gets_texts_of_text_prompts_and_messages_of_others():
    environment = rewarding("of_trl_shown")
    text, messages = environment.tasks("train")[0], environment.tasks("train")[2]
    assert step(environment, "4", task=text).info == {"prompt": "What is 2 + 2?", "completion": "4"}
    shown = step(environment, "10", task=messages).info
    assert shown["completion"] == [{"role": "assistant", "content": "10"}]
    assert [message["role"] for message in shown["prompt"]] == ["system", "user"]


def test_none_of_trl_counts_beside_others_alone():
    environment = rewarding("exact", "of_trl_sometimes")
    assert step(environment, "4").parts == {"exact": 1.0}
    other_task = attrs.evolve(TASK, data={"answer": "7"})
    assert step(environment, "7", task=other_task).parts == {"exact": 1.0, "of_trl_sometimes": 1.0}
    with pytest.raises(ContractError, match="the reward of_trl_sometimes returned None"):
        step(rewarding("of_trl_sometimes"), "4")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text_reward", "the reward text_reward returned '1.0'"),
        ("nan_reward", "the reward nan_reward returned nan"),
        ("tensor_of_two", r"the reward tensor_of_two returned tensor\(\[1., 1.\]\)"),
        ("of_trl_wrong", "the reward 'of_trl_wrong' returned 1.0 for one completion"),
        ("of_lists_too_many", r"the reward 'of_lists_too_many' returned \[0.0, 1.0\] for one completion"),
        ("of_lists_text", "the reward 'of_lists_text' returned '1' for one completion"),
    ],
)
def test_what_is_no_number_is_refused(name, words):
    with pytest.raises(ContractError, match=words):
        step(rewarding(name), "4")


def test_a_result_cannot_be_weighed():
    with pytest.raises(ContractError, match="the reward explained returned StepResult"):
        step(rewarding("exact", "explained"), "4")
    halved = make(FunctionOptions(data=SUMS, rewards=(RewardTable(f"{REWARDS}:explained", 0.5),)))
    with pytest.raises(ContractError, match="the reward explained returned StepResult"):
        step(halved, "4")


@pytest.mark.parametrize(
    ("reference", "words", "remedy"),
    [
        ("rewards.py", "'rewards.py' names no function", "./file.py:name"),
        ("./missing.py:score", "there is no file missing.py", "Correct the path"),
        (f"{REWARDS}:missing", "has no function 'missing'", "It has add, .*exact"),
        (f"{REWARDS}:number", "has no function 'number'", "correct the name"),
        (f"{MATERIAL / 'broken.py'}:score", "cannot be imported: RuntimeError: no licence", "Correct the file"),
        (f"{MATERIAL / 'leaving.py'}:score", "cannot be imported: SystemExit: no arguments", "Correct the file"),
        ("no_such_package:score", "cannot be imported: ModuleNotFoundError", "Correct the file"),
    ],
)
def test_a_function_that_is_not_there_is_named(reference, words, remedy):
    with pytest.raises(DataError, match=words) as raised:
        make(FunctionOptions(data=SUMS, reward=reference))
    assert re.search(remedy, raised.value.remedy)


def test_functions_that_no_engine_calls_so_are_refused():
    for name in ("of_nobody", "of_three"):
        with pytest.raises(ContractError, match=f"the reward '{name}' takes"):
            rewarding(name)
    with pytest.raises(DataError, match=r"the reward decorated_lists of .* has options of its own"):
        rewarding("decorated_lists")


def test_a_reward_is_needed_and_named_once():
    with pytest.raises(DataError, match="the environment function has no reward"):
        make(FunctionOptions(data=SUMS))
    with pytest.raises(DataError, match="two rewards have the same name"):
        rewarding("exact", "exact")


def test_the_version_is_that_of_the_functions(tmp_path):
    file = tmp_path / "r.py"
    versions = []
    for text in ("def score(text, task):\n    return 0.0\n", "def score(text, task):\n    return 1.0\n"):
        file.write_text(text)
        environment = make(FunctionOptions(data=SUMS, reward=f"{file}:score"))
        versions.append(environment.claims.version)
        assert step(environment, "4").reward == float(len(versions) - 1), "a file that changed is read again"
    assert versions[0] != versions[1]


def test_a_file_may_import_its_neighbour(tmp_path):
    (tmp_path / "neighbour_of_rewards.py").write_text("WORTH = 0.25\n")
    (tmp_path / "r.py").write_text("import neighbour_of_rewards\n\ndef score(text, task):\n    return neighbour_of_rewards.WORTH\n")
    assert function_of(f"{tmp_path / 'r.py'}:score")("", None) == 0.25


def test_a_decorated_function_is_a_plugin():
    environment = select_plugin("environment", f"{REWARDS}:decorated", {"data": SUMS}).make(FactoryContext(1, 0, 64))
    assert environment.claims.pass_threshold == 0.5
    assert step(environment, "4").reward == 1.0


# --- tools -------------------------------------------------------------------------------------------------------------------------


def test_a_tool_is_described_by_its_signature():
    assert Tool.of(function_of(f"{REWARDS}:add")).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "left": {"type": "integer", "description": "The first number."},
                    "right": {"type": "integer", "description": "The second one."},
                },
                "required": ["left"],
            },
        },
    }
    parameters = Tool.of(function_of(f"{REWARDS}:look_up")).schema["function"]["parameters"]
    assert parameters["properties"]["kinds"] == {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("undocumented", "has no docstring"),
        ("untyped", "the parameter 'word' of the tool untyped has no type"),
        ("of_bytes", "which JSON has not"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(name, words):
    with pytest.raises(DataError, match=words):
        rewarding("exact", tools=(f"{REWARDS}:{name}",))


def with_tools(max_turns=3):
    return rewarding("exact", tools=(f"{REWARDS}:add", f"{REWARDS}:look_up"), max_turns=max_turns)


def test_calls_are_answered_and_the_last_word_is_scored():
    environment = with_tools()
    assert [tool["function"]["name"] for tool in environment.tasks("train")[0].tools] == ["add", "look_up"]
    calls = [ToolCall("add", {"left": 2, "right": 2}, "c1"), ToolCall("look_up", {"word": "sum"})]
    answer = step(environment, "", calls=calls)
    assert (answer.done, answer.reward) == (False, 0.0)
    assert answer.messages == (
        {"role": "tool", "name": "add", "content": "4", "tool_call_id": "c1"},
        {"role": "tool", "name": "look_up", "content": '{"word": "sum", "kinds": ""}'},
    )
    assert step(environment, "4", turn=1) == StepResult(1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall("multiply", {}), "error: there is no tool 'multiply'; there are add, look_up"),
        (ToolCall("add", {}), "error: TypeError: missing a required argument: 'left'"),
        (ToolCall("add", {"left": 1, "third": 2}), "error: TypeError: got an unexpected keyword argument 'third'"),
        (ToolCall("add", {"left": "1"}), "error: TypeError"),
    ],
)
def test_the_model_is_told_of_a_wrong_call(call, words):
    (message,) = step(with_tools(), "", calls=[call]).messages
    assert message["role"] == "tool"
    assert message["content"].startswith(words)


def test_the_model_is_told_of_a_call_that_cannot_be_read():
    (message,) = step(with_tools(), "<tool_call>{", problem="the call is not closed").messages
    assert message["content"] == "error: the call is not closed"


def test_the_last_turn_is_scored_and_calls_nothing(tmp_path):
    called = tmp_path / "called"
    (tmp_path / "tool.py").write_text(
        f"from pathlib import Path\n\ndef touch() -> str:\n    '''Touch.'''\n    Path({str(called)!r}).touch()\n    return 'done'\n"
    )
    environment = rewarding("exact", tools=(f"{tmp_path / 'tool.py'}:touch",), max_turns=2)
    assert step(environment, "4", turn=1, calls=[ToolCall("touch", {})]) == StepResult(1.0)
    assert not called.exists()
    assert not step(environment, "4", turn=0, calls=[ToolCall("touch", {})]).done
    assert called.exists()


@pytest.mark.parametrize("says", [True, False])
def test_a_reward_that_may_answer_otherwise_is_declared(tmp_path, says):
    (tmp_path / "r.py").write_text("import random\n\ndef score(text, task):\n    return random.random()\n")
    options = {"reward": f"{tmp_path / 'r.py'}:score", "data": SUMS, **({"random": True} if says else {})}
    assert select_plugin("environment", "function", options).make(FactoryContext(1, 0, 64)).claims.random == says
