"""`config show`, `config check` and `config schema`."""

import json
import tomllib

import pytest

GOOD = '[model]\npath = "m"\n\n[data]\ntrain = "d.jsonl"\n'
BAD = '[model]\npaht = "m"\npath = "m"\n\n[data]\ntrain = "d.jsonl"\n\n[training]\nsteps = "ten"\n\n[optimizer]\nlearning_rate = -1.0\n'


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(GOOD)
    return path


def test_show_names_the_origin_of_every_key(command, good):
    shown = json.loads(command("config", "show", good, "training.steps=7", "--reducer", "sum", "--json").out)
    assert shown["model.path"] == {"value": "m", "origin": f"{good}:2"}
    assert shown["training.steps"] == {"value": 7, "origin": "command line"}
    assert shown["reducer.use"] == {"value": "sum", "origin": "--reducer"}
    assert shown["run.seed"] == {"value": 0, "origin": "default"}
    lines = command("config", "show", good).out.splitlines()
    assert ["model.path", '"m"', f"{good}:2"] in [line.split() for line in lines]


def test_show_works_without_a_file(command):
    for arguments in ([], ["training.batch_size=4"]):
        outcome = command("config", "show", *arguments, "--json")
        assert outcome.code == 0, outcome.err
        assert json.loads(outcome.out)["training.batch_size"]["value"] == (4 if arguments else 32)


def test_check_of_a_good_file(command, good):
    outcome = command("config", "check", good)
    assert (outcome.code, outcome.out) == (
        0,
        f"{good}: no mistakes. `skyrl-engine run --dry-run` looks at the model and the data too.\n",
    )


def test_check_prints_every_mistake_and_one_last_line(command, tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(BAD)
    outcome = command("config", "check", path)
    lines = outcome.err.splitlines()
    assert outcome.code == 2
    assert len(lines) == 4
    assert all(line.startswith(str(path)) for line in lines[:3])
    assert lines[3] == "error: the configuration has 3 mistakes. Correct each line above."
    assert "model.path" in lines[0] or "path" in lines[0]


def test_check_names_a_missing_plugin_with_code_3(command, good):
    outcome = command("config", "check", good, "--loss", "cross_entrophy")
    assert outcome.code == 3
    assert "cross_entropy" in outcome.last_line


def test_schema_is_a_json_schema(command):
    schema = json.loads(command("config", "schema").out)
    assert schema["properties"]["training"]["properties"]["batch_size"]


def test_a_file_that_is_not_there(command):
    outcome = command("config", "check", "none.toml")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "none.toml" in outcome.err
    assert tomllib.loads(GOOD)
