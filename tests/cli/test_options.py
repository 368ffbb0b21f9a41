"""Options that commands share: `--map`, `--lora`, and `--set` beside `key=value`."""

import json
import re
import tomllib

import pytest

from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and rows whose columns have names of their own."""
    folder = tmp_path_factory.mktemp("questions")
    make_model(folder / "model", [Exchange(f"Say {number:03d}", f"{number:03d}") for number in range(24)])
    rows = [{"question": f"Say {number:03d}", "answer": f"{number:03d}", "other": "no"} for number in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    strange = [{"frage": row["question"], "antwort": row["answer"], "sonst": row["other"]} for row in rows]
    (folder / "strange.jsonl").write_text("".join(json.dumps(row) + "\n" for row in strange))
    (folder / "my_reward.py").write_text("def score(text, task):\n    return float(text == task.data['answer'])\n")
    return folder


@pytest.fixture
def parts(folder):
    """Words of the command lines below, and what stands for them."""
    return {
        "{model}": str(folder / "model"),
        "{rows}": str(folder / "rows.jsonl"),
        "{reward}": f"{folder / 'my_reward.py'}:score",
    }


@pytest.fixture
def strange(parts, folder):
    """The same with columns whose names are those of no known format."""
    return {**parts, "{rows}": str(folder / "strange.jsonl")}


def words(line, parts):
    return [parts.get(word, word) for word in line.split()]


REWARDED = "--model {model} --reward {reward} --data {rows}"
SHORT = "--max-tokens 4 rl.max_prompt_tokens=64"
ASKED = {
    "sft": ("sft --model {model} --data {rows} --dry-run", ("prompt=question", "completion=answer")),
    "preference": ("preference --model {model} --data {rows} --dry-run", ("prompt=question", "chosen=answer", "rejected=other")),
    "reward-model": (
        "reward-model --model {model} --data {rows} --dry-run",
        ("prompt=question", "chosen=answer", "rejected=other"),
    ),
    "rl": (f"rl {REWARDED} {SHORT} --dry-run", ("prompt=question",)),
    "distill on samples": (
        f"distill --model {{model}} --teacher {{model}} --prompts {{rows}} {SHORT} --dry-run",
        ("prompt=question",),
    ),
    "distill on rows": (
        "distill --model {model} --teacher {model} --data {rows} --dry-run",
        ("prompt=question", "completion=answer"),
    ),
    "evaluate": (f"evaluate {REWARDED} {SHORT} --tasks 2", ("prompt=question",)),
    "data preview": ("data preview --model {model} --data {rows}", ("prompt=question", "completion=answer")),
}


@pytest.mark.parametrize("name", ASKED)
def test_rows_of_questions_and_answers_are_read_by_map(command, parts, name):
    line, pairs = ASKED[name]
    outcome = command(*words(line, parts), *(word for pair in pairs for word in ("--map", pair)))
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", ASKED)
def test_without_it_the_error_names_the_option(command, strange, name):
    refused = command(*words(ASKED[name][0], strange))
    assert refused.code == 4, refused.out
    assert "--map " in refused.last_line
    assert "data.map" not in refused.last_line


@pytest.mark.parametrize("name", ASKED)
def test_a_column_that_the_data_does_not_have_is_named(command, parts, name):
    line, pairs = ASKED[name]
    pairs = ("prompt=questions", *pairs[1:])
    outcome = command(*words(line, parts), *(word for pair in pairs for word in ("--map", pair)))
    assert outcome.code == 4
    assert "has no column 'questions'" in outcome.last_line
    assert "--map prompt=question" in outcome.last_line


def test_in_a_configuration_the_error_names_its_key(command, strange, tmp_path):
    (tmp_path / "train.toml").write_text(f'[model]\npath = "{strange["{model}"]}"\n[data]\ntrain = "{strange["{rows}"]}"\n')
    refused = command("run", "train.toml", "--dry-run")
    assert "data.map.prompt=question" in refused.last_line
    taken = command("run", "train.toml", "data.map.prompt=frage", "--set", "data.map.completion=antwort", "--dry-run")
    assert taken.code == 0, taken.err


@pytest.mark.parametrize(("given", "told"), [("question", "is not of the form OURS=THEIRS"), ("prompt=", "is not of the form")])
def test_a_map_that_is_none_is_refused(command, parts, given, told):
    outcome = command("sft", "--model", parts["{model}"], "--data", parts["{rows}"], "--map", given)
    assert outcome.code == 2
    assert told in outcome.last_line


def test_one_name_for_two_columns_is_refused(command, parts):
    twice = ("--map", "prompt=question", "--map", "prompt=answer")
    outcome = command("sft", "--model", parts["{model}"], "--data", parts["{rows}"], *twice)
    assert (outcome.code, "prompt is given twice" in outcome.last_line) == (2, True)


def test_a_map_without_a_table_of_tasks_is_refused(command, parts):
    outcome = command("rl", "--model", parts["{model}"], "--env", "reasoning_gym:spell_backward", "--map", "prompt=question")
    assert outcome.code == 2
    assert "map" in outcome.err


@pytest.mark.parametrize(
    "line",
    [
        "sft --model {model} --data {rows} --map prompt=question --map completion=answer",
        f"rl {REWARDED} --map prompt=question {SHORT}",
    ],
)
def test_lora_takes_a_rank(command, parts, line):
    outcome = command(*words(line, parts), "--lora", "8", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert tomllib.loads(outcome.out)["model"]["lora"] == {"rank": 8}
    if line.startswith("sft"):
        assert re.search(r"adapters\s+\S", outcome.err)


WITH_KEYS = {
    "run": "run train.toml --dry-run",
    "sft": "sft --model {model} --data {rows} --map prompt=question --map completion=answer --dry-run",
    "rl": f"rl {REWARDED} --map prompt=question {SHORT} --dry-run",
    "config show": "config show train.toml",
    "config check": "config check train.toml",
    "data preview": "data preview train.toml",
    "evaluate": f"evaluate {REWARDED} --map prompt=question {SHORT} --tasks 2",
}


@pytest.mark.parametrize("name", WITH_KEYS)
@pytest.mark.parametrize("spelling", [(), ("--set",)], ids=["key=value", "--set"])
def test_keys_are_given_in_both_spellings(command, parts, tmp_path, name, spelling):
    """A key that is taken changes nothing visible everywhere, so the proof is one that is wrong: it is refused by its name."""
    (tmp_path / "train.toml").write_text(
        f'[model]\npath = "{parts["{model}"]}"\n[data]\ntrain = "{parts["{rows}"]}"\n'
        'map = { prompt = "question", completion = "answer" }\n'
    )
    line = words(WITH_KEYS[name], parts)
    assert command(*line, *spelling, "run.seed=3").code == 0
    refused = command(*line, *spelling, "run.seed=three")
    assert refused.code == 2
    assert "run.seed" in refused.err


def test_a_key_alone_stands_where_a_run_would(command, parts):
    """The first word after `evaluate` is a run, unless it is a key with a value."""
    line = words(f"evaluate generator.slots=4 {REWARDED} --map prompt=question {SHORT} --tasks 2", parts)
    outcome = command(*line)
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("spelling", [(), ("--set",)], ids=["key=value", "--set"])
def test_options_of_an_environment_are_given_in_both_spellings(command, parts, spelling):
    named = [word for key in ("data={rows}", "map.prompt=question", "reward={reward}") for word in (*spelling, key)]
    named = [word.replace("{rows}", parts["{rows}"]).replace("{reward}", parts["{reward}"]) for word in named]
    shown = command("env", "show", "function", *named, "--json")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)["tasks"] == 24
    tried = command("env", "try", "function", *named, "--answer", "000")
    assert tried.code == 0, tried.err
