"""No key=value of a command line vanishes: it reaches the table that options or files make, or is refused by its name.

Every command that takes key=value and every table of the schema is walked, so that a new one cannot be forgotten. A key is seen to arrive by
a value that no key takes, a list in a list: whoever reads it refuses it by name, and whoever drops it says nothing.
"""

import tomllib

import attrs
import pytest
from command_lines import OF_PLUGINS, OF_TRAINERS, WITH_FLAGS, add_texts, tables, values_of_the_schema

from skyrl_engine.cli import data, diff_backends, evaluate, prove
from skyrl_engine.cli.app import app
from skyrl_engine.cli.command import every_command
from skyrl_engine.config.structure import plugin_lists
from skyrl_engine.config.trainers import TRAINERS

NONSENSE = "utter_nonsense"

COMMAND_LINES = [
    *([part.format(trainer=trainer) for part in line] for line in OF_TRAINERS.values() for trainer in TRAINERS),
    *(line for lines in WITH_FLAGS.values() for line in lines),
]


def takes_keys(command: object) -> bool:
    params = getattr(command, "params", [])
    return any("=" in (param.metavar or "").replace("==", "") for param in params)  # NAME==VERSION is no key


def test_every_command_that_takes_keys_is_tried() -> None:
    names = {" ".join(path[1:]) for path, command in every_command(app, ("skyrl-engine",)) if takes_keys(command)}
    assert names == {*OF_TRAINERS, *WITH_FLAGS, *OF_PLUGINS}


def test_the_walk_sees_tables_in_lists_and_in_tables() -> None:
    assert {"model.lora", "rl.kl", "loss.terms.0", "environments.0", "group_filters.0", "backend", "generator"} <= dict(
        tables()
    ).keys()


def is_named(key: str, err: str) -> bool:
    """Say whether a line is about a key, or about a table or a list around it, which is then not read as a whole."""
    lines, parts = err.splitlines(), key.split(".")
    if any(f"[{parts[0]}] is a table of" in line or f"[{parts[0]}] selects" in line for line in lines):
        return True
    around = [parts[:end] for end in range(len(parts), 0, -1)]
    spelt = {spelling for each in around for spelling in (".".join(each), with_brackets(each))}
    return any(f": {each}: " in line or f": {with_brackets(parts)}[" in line for each in spelt for line in lines)


def with_brackets(parts: list[str]) -> str:
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts).removeprefix(".")


def find_vanished(command, line: list[str], keys: dict[str, str]) -> list[str]:
    """Return the keys that a command neither reads nor refuses; those that it names are left out the next time, as a person would."""
    left = list(keys)
    while left:
        outcome = command(*line, *add_texts(line, [f"{key}={keys[key]}" for key in left]))
        assert outcome.code in (2, 3), (outcome.code, outcome.err)
        unnamed = [key for key in left if not is_named(key, outcome.err)]
        if len(unnamed) == len(left):
            break
        left = unnamed
    return left


@pytest.mark.parametrize("line", COMMAND_LINES, ids=" ".join)
def test_a_key_that_no_table_knows_is_refused_by_name(command, inputs, line) -> None:
    unknown = {f"{key}.{NONSENSE}": "1" for key, _ in tables() if "0" not in key.split(".")}
    assert find_vanished(command, line, unknown) == []
    top = {NONSENSE: "1", f"{NONSENSE}_too.deep.er": "1", f"observers.{NONSENSE}": "1", f"plugins.pin.{NONSENSE}": "1"}
    assert find_vanished(command, line, top) == []
    lists = {f"{key}.{NONSENSE}": "1" for key, _ in tables() if "0" in key.split(".")}
    assert find_vanished(command, line, lists) == []
    without_position = {f"{key.removesuffix('.0')}.{NONSENSE}": "1" for key, _ in tables() if key.endswith(".0")}
    assert find_vanished(command, line, without_position) == []


@pytest.mark.parametrize("line", COMMAND_LINES, ids=" ".join)
def test_every_key_of_every_table_is_read_or_refused_by_name(command, inputs, line) -> None:
    keys = {
        f"{table}.{attribute.alias or attribute.name}": "[[]]"
        for table, schema in tables()
        for attribute in attrs.fields(schema)
        if attribute.name != "options" and attribute.name not in plugin_lists(schema)
    }
    assert "environments.0.weight" in keys
    assert "rl.kl.coef" in keys
    of_lists = {key: value for key, value in keys.items() if "0" in key.split(".")}
    plain = {
        key: value for key, value in keys.items() if key not in of_lists and not any(other.startswith(f"{key}.") for other in keys)
    }
    assert find_vanished(command, line, plain) == []
    assert find_vanished(command, line, of_lists) == []


@pytest.mark.parametrize("line", OF_PLUGINS.values(), ids=" ".join)
@pytest.mark.parametrize("key", [NONSENSE, f"{NONSENSE}.deep.er"])
def test_an_option_that_a_plugin_does_not_know_is_refused_by_name(command, line, key) -> None:
    outcome = command(*line, *add_texts(line, [f"{key}=1"]))
    assert outcome.code == 2
    assert NONSENSE in outcome.err


def test_an_option_of_a_plugin_does_not_replace_what_its_name_says(command) -> None:
    outcome = command("env", "show", "gymnasium:CartPole-v1", "--set", "id=Taxi-v3")
    assert outcome.code == 2
    assert "id=Taxi-v3 is given too" in outcome.last_line


@pytest.mark.parametrize(
    ("line", "key", "at"),
    [
        (WITH_FLAGS["rl"][1], "environments.0.weight", 0),
        (WITH_FLAGS["rl"][2], "environments.0.weight", 0),
        (WITH_FLAGS["rl"][3], "environments.1.weight", 1),
        (WITH_FLAGS["distill"][2], "environments.0.weight", 0),
        (WITH_FLAGS["distill"][3], "environments.0.weight", 0),
    ],
)
def test_an_override_reaches_the_environment_that_an_option_makes(command, inputs, line, key, at) -> None:
    outcome = command(*line, f"{key}=3.5", "--dry-run")
    environments = tomllib.loads(outcome.out)["environments"]
    assert environments[at]["weight"] == 3.5
    assert [environment["use"] for environment in environments] == [
        environment["use"] for environment in tomllib.loads(command(*line, "--dry-run").out)["environments"]
    ]


def test_an_override_reaches_the_environment_of_the_evaluated_run(command, inputs) -> None:
    last = command("evaluate", "trained", "--set", "environments.0.weight=-1").last_line
    assert "environments[0].weight" in last
    assert "-1" in last


def test_an_override_reaches_an_entry_of_a_file(command, inputs) -> None:
    outcome = command("config", "show", "rl.toml", "environments.0.weight=2.5", "--json")
    assert '"environments[0].weight": {\n    "value": 2.5,\n    "origin": "command line"' in outcome.out


def test_an_override_wins_over_a_default_of_a_command(command, inputs) -> None:
    """The number of samples has a default, and nobody typed it."""
    outcome = command("evaluate", "--model", "m", "--env", "gymnasium:Acrobot-v1", "--set", "evaluation.samples=0")
    assert "command line: evaluation.samples: must be" in outcome.last_line
    outcome = command("distill", "--model", "m", "--data", "d.jsonl", "loss.use=cross_entropy", "--dry-run")
    assert tomllib.loads(outcome.out)["loss"] == {"use": "cross_entropy"}
    outcome = command("distill", "--model", "m", "--data", "d.jsonl", "loss={}", "--dry-run")
    assert tomllib.loads(outcome.out)["loss"] == {"use": "top_k_divergence"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([*WITH_FLAGS["rl"][3], "environments.0.use=spell"], "--env: environments.0.use: environments.0.use=spell is given too"),
        ([*WITH_FLAGS["rl"][3], "environments.0.id=Taxi-v3"], "--env: environments.0.id: environments.0.id=Taxi-v3 is given too"),
        ([*WITH_FLAGS["rl"][3], "environments=[{use='spell'}]"], "--env: environments: environments=[{use='spell'}] is given too"),
        ([*WITH_FLAGS["sft"][0], "model={path='other'}"], "--model: model.path: model={path='other'} is given too"),
        ([*WITH_FLAGS["sft"][0], "loss.use=a", "loss={use='b'}"], "command line: loss.use: loss.use=a is given too"),
        ([*WITH_FLAGS["rl"][3], "environments.2.weight=3"], "environments is a list of 2 tables, counted from 0"),
        ([*WITH_FLAGS["rl"][3], "environments.weight=3"], "'weight' is no position in it. Write environments.0.weight"),
    ],
)
def test_a_key_that_says_otherwise_than_an_option_is_refused(command, inputs, line, words) -> None:
    outcome = command(*line)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err


def test_the_family_of_the_small_model_is_refused_beside_a_model(command, inputs) -> None:
    outcome = command("diff-backends", "sft.toml", "--b", "fsdp", "--family", "qwen3")
    assert outcome.code == 2
    assert "--family" in outcome.last_line


PARTIAL = {
    "evaluate": (["evaluate", "--model", "m", "--env", "gymnasium:Acrobot-v1"], evaluate.READ),
    "evaluate RUN": (["evaluate", "trained"], evaluate.READ),
    "data preview": (["data", "preview", "sft.toml"], data.READ),
    "prove": (["prove"], prove.READ),
    "diff-backends": (["diff-backends", "--b", "fsdp"], diff_backends.READ_OF_TABLES),
    "diff-backends CONFIG": (["diff-backends", "sft.toml", "--b", "fsdp"], diff_backends.READ_WITH_MODEL),
}
"""Commands that read a part of the keys, with the declaration of that part. The others make the configuration of a run, whose trainer reads
all of its tables.
"""


def without_positions(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdecimal())


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rl.steps=7", "rl.steps: is nothing that evaluate reads. Remove it: an evaluation trains nothing."),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate: is nothing that evaluate reads."),
        ("rl.groups=999", "rl.groups: is nothing that evaluate reads. Set evaluation.tasks."),
        ("rl.micro_batch_rows=2", "Remove it, or add to rl.reward_models: it is about how a reward model computes."),
        (
            "environments.0.weight=2.0",
            "environments[0].weight: is nothing that evaluate reads. Remove it: environments have equal shares",
        ),
    ],
)
def test_an_evaluation_says_why_it_refuses_a_key(command, inputs, key, words) -> None:
    for line in (["evaluate", "trained"], ["evaluate", "trained", "--set"]):
        outcome = command(*line, key)
        assert outcome.code == 2
        assert words in outcome.last_line


def is_called_unread(key: str, err: str) -> bool:
    return any(f": {spelling}: is nothing that " in err for spelling in (key, with_brackets(key.split("."))))


@pytest.mark.parametrize("read", [evaluate.READ, evaluate.OF_REWARD_MODEL, data.READ, prove.READ, diff_backends.READ_WITH_MODEL])
def test_what_a_command_declares_to_read_is_in_the_schema(read) -> None:
    known = {"trainer"}
    for key in values_of_the_schema():
        parts = without_positions(key).split(".")
        known |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    assert read.names | read.but <= known


@pytest.mark.parametrize(("line", "reads"), PARTIAL.values(), ids=PARTIAL)
def test_a_key_that_a_command_does_not_read_is_refused_with_the_reason(command, inputs, line, reads) -> None:
    """The whole schema, with values that keys take: what the command declares to read is never called unread, all else is refused."""
    values = values_of_the_schema()
    if line == ["diff-backends", "--b", "fsdp"]:
        # naming a model makes the comparison another one, of a run's first batch
        values = {key: value for key, value in values.items() if not key.startswith("model.")}
    read = {key for key in values if reads.has(without_positions(key))}
    err = command(*line, *add_texts(line, [f"{key}={values[key]}" for key in values if key not in read])).err
    silent = []
    for key in sorted(values.keys() - read):
        if not is_called_unread(key, err):
            alone = command(*line, *add_texts(line, [f"{key}={values[key]}"]))
            silent += [] if alone.code == 2 and is_named(key, alone.err) else [(key, alone.err)]
    assert silent == []
    assert err.count("is nothing that ") > len(values) // 4
    # --a and --b decide that one
    for key in sorted(read - {"backend.use"}):
        assert not is_called_unread(key, command(*line, *add_texts(line, [f"{key}=[[]]"])).err)
