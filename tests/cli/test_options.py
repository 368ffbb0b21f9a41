"""Options that commands share: `--map`, `--lora`, and `--set` next to `key=value`."""

import json
import re
import tomllib

import pytest
from by_day import now

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


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        ("rl --model ./m --reward ./r.py:f --data ./x --eval-data ./y", {"--model", "--reward", "--data", "--eval-data"}),
        ("rl --model ./m --env prompts --data ./x --eval-data ./y", {"--model", "--data", "--eval-data"}),
        ("rl --model ./m --reward ./r.py:f --data hub/x --tool ./t.py:f", {"--model", "--reward", "--tool"}),
        ("evaluate --model ./m --reward ./r.py:f --data ./x --seed -1", {"--model", "--reward", "--data", "--seed"}),
        ("distill --model ./m --teacher ./t --prompts ./x", {"--model", "--teacher", "--prompts"}),
    ],
)
def test_a_missing_file_is_told_under_the_option_that_gave_it(command, line, labels):
    """Also inside the environment that several options make together; with a further mistake all are reported by the configuration's keys."""
    further = () if "--seed" in line else ("run.seed=-1",)
    outcome = command(*line.split(), *further)
    lines = outcome.err.splitlines()[:-1]
    assert outcome.code == 2
    assert {row.partition(":")[0] for row in lines} == labels | ({"command line"} if further else set())


def test_a_file_that_is_missed_while_planning_is_told_in_the_same_form(command):
    """Without a mistake that stops the reading of the configuration, planning looks for the files."""
    lines = command(*["rl", "--model", "./m", "--reward", "./r.py:f", "--data", "./x", "--eval-data", "./y"]).err.splitlines()
    assert any(row.startswith("--data: environments[0].data: there is nothing at ") for row in lines)
    assert any(row.startswith("--eval-data: environments[0].eval_data: there is nothing at ") for row in lines)


def words(line, parts):
    return fill(line, parts).split()


def fill(text, parts):
    """Put the values of parts where their words occur in a text."""
    for word, value in parts.items():
        text = text.replace(word, value)
    return text


REWARDED = "--model {model} --reward {reward} --data {rows}"
TWO_ENVIRONMENTS = "--model {model} --env reasoning_gym:spell_backward --env {env} environments.1.data={rows}"
SHORT = "--max-tokens 4 rl.max_prompt_tokens=80"
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


TABLE = '[[environments]]\nuse = "function"\nreward = "{reward}"\ndata = "{rows}"\nmap = { prompt = "question" }\n'
HEAD = 'trainer = "rl"\n[model]\npath = "{model}"\n[rl]\nmax_tokens = 4\nmax_prompt_tokens = 64\n'
FILES = {
    "one.toml": HEAD + TABLE.replace("question", "questions"),
    "second.toml": HEAD + TABLE + TABLE.replace("question", "questions"),
    "unnamed.yaml": "trainer: rl\nmodel: {path: MODEL}\nrl: {max_tokens: 4, max_prompt_tokens: 64}\n"
    "environments:\n  - {use: function, reward: 'REWARD', data: ROWS}\n",
    "samples.toml": '[model]\npath = "{model}"\n[data]\ntrain = "{rows}"\nmap = { prompt = "questions", completion = "answer" }\n',
}
"""Configurations whose column names are wrong."""

WRONG = {
    "run": "run one.toml --dry-run",
    "run, the second environment": "run second.toml --dry-run",
    "run, YAML without a name": "run unnamed.yaml --dry-run",
    "run on samples": "run samples.toml --dry-run",
    "data preview of a file": "data preview samples.toml",
    "data preview": "data preview --model {model} --data {rows} --map prompt=questions --map completion=answer",
    "sft": "sft --model {model} --data {rows} --map prompt=questions --map completion=answer --dry-run",
    "rl": f"rl {REWARDED} --map prompt=questions {SHORT} --dry-run",
    "rl, a reward's environment": f"rl --model {{model}} --env {{env}} --data {{rows}} --map prompt=questions {SHORT} --dry-run",
    "rl, a reward with an environment": f"rl {REWARDED} --env reasoning_gym:spell_backward --map prompt=questions {SHORT} --dry-run",
    "rl, an environment with a reward": f"rl {REWARDED} --env {{env}} environments.0.data={{rows}} --map prompt=question {SHORT} --dry-run",
    "rl, two environments": f"rl {TWO_ENVIRONMENTS} {SHORT} --dry-run",
    "distill on samples": f"distill --model {{model}} --teacher {{model}} --prompts {{rows}} --map prompt=questions {SHORT} --dry-run",
    "evaluate": f"evaluate {REWARDED} --map prompt=questions {SHORT} --tasks 2",
    "evaluate an environment": f"evaluate --model {{model}} --env {{env}} --data {{rows}} {SHORT} --tasks 2",
    "evaluate a run": "evaluate {run} --tasks 2 --split train",
    "evaluate a run again": "evaluate {run} --reward {reward} --tasks 2 --split train",
    "env show": "env show function data={rows} reward={reward} map.prompt=questions",
    "env try": "env try function data={rows} reward={reward} --answer 000",
}
NAMED = re.compile(r"(?P<option>--map )?(?P<key>[\w.]*\w)=(?P<column>\w+)")


@pytest.fixture
def misnamed(parts, folder, tmp_path):
    """Files and a run directory whose environments name a column that the rows do not have, and an environment of one's own."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row["question"], "answer": row["answer"]}) + "\n" for row in rows))
    mine = folder / "my_environment.py"
    mine.write_text(
        "import skyrl_engine\n\n\n@skyrl_engine.reward()\ndef mine(text, task):\n    return float(text == task.data['answer'])\n"
    )
    parts = {**parts, "{prompts}": str(prompts), "{env}": f"{mine}:mine", "{run}": str(tmp_path / "run")}
    for name, text in FILES.items():
        (tmp_path / name).write_text(
            fill(text, {**parts, "MODEL": parts["{model}"], "REWARD": parts["{reward}"], "ROWS": parts["{rows}"]})
        )
    return parts


@pytest.fixture
def trained_run(command, misnamed, tmp_path, monkeypatch):
    """A run whose rows have since got other columns."""
    rows = tmp_path / "own.jsonl"
    rows.write_text((tmp_path / misnamed["{prompts}"]).read_text())
    line = f"rl --model {{model}} --reward {{reward}} --data {rows} {SHORT} --group-size 2 --groups 2 --steps 1 --output run"
    outcome = command(*words(line, misnamed))
    assert outcome.code == 0, outcome.err
    rows.write_text(rows.read_text().replace('"prompt"', '"question"'))


def correct(line, key, option):
    """Put one column's name where the error says."""
    start = f"{option}{key}="
    cleared = re.sub(rf"{re.escape(start)}\w+", "", line)
    return f"{cleared} {start}question"


@pytest.mark.parametrize("name", now(WRONG, "evaluate a run", "evaluate", "rl, two environments", "run, the second environment"))
def test_an_error_about_a_column_names_what_works_in_that_command(command, misnamed, request, name):
    """The remedy is taken literally: it is added to the command line, with the rows' own name of the column."""
    if "{run}" in WRONG[name]:
        request.getfixturevalue("trained_run")
    refused = command(*words(WRONG[name], misnamed))
    assert refused.code == 4, refused.err
    matches = [match for match in NAMED.finditer(refused.last_line) if match["key"].endswith("prompt")]
    assert matches, refused.last_line
    again = command(*words(correct(WRONG[name], matches[0]["key"], matches[0]["option"] or ""), misnamed))
    assert again.code == 0, again.err


def test_of_several_mistakes_each_names_what_works(command, misnamed):
    line = f"rl {REWARDED} --env {{env}} environments.0.data={{rows}} --map prompt=questions {SHORT} --dry-run"
    refused = command(*words(line, misnamed))
    first, second = (row for row in refused.err.splitlines() if "for instance" in row or "has no column" in row)
    assert (refused.code, "environments.0.map.prompt=question" in first, "--map prompt=question" in second) == (4, True, True)


@pytest.mark.parametrize(("pair", "cause"), [("question", "is not of the form OURS=THEIRS"), ("prompt=", "is not of the form")])
def test_a_map_that_is_none_is_refused(command, parts, pair, cause):
    outcome = command("sft", "--model", parts["{model}"], "--data", parts["{rows}"], "--map", pair)
    assert outcome.code == 2
    assert cause in outcome.last_line


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
    named = words(" ".join(named), parts)
    shown = command("env", "show", "function", *named, "--json")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)["tasks"] == 24
    tried = command("env", "try", "function", *named, "--answer", "000")
    assert tried.code == 0, tried.err
