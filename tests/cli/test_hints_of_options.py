"""A word that is no option is answered with an option or a key that this very command takes, or with nothing.

Every command is asked for every word under which anybody knows a key, and for the name of every key.
"""

import functools
import re

import attrs
import pytest
from command_lines import OF_TRAINERS, WITH_FLAGS, add_texts, tables, values_of_the_schema

from skyrl_engine.cli.app import app
from skyrl_engine.cli.command import EngineCommand, every_command
from skyrl_engine.config import find_trainer
from skyrl_engine.config.foreign_keys import read_foreign_keys

COMMANDS = {
    " ".join(path[1:]): command for path, command in every_command(app, ("skyrl-engine",)) if isinstance(command, EngineCommand)
}

LINES = {
    **{name: [part.format(trainer=trainer) for part in line] for name, line in OF_TRAINERS.items() for trainer in ("sft", "rl")},
    **{
        f"{name} {trainer}": [part.format(trainer=trainer) for part in line]
        for name, line in OF_TRAINERS.items()
        for trainer in ("sft", "rl")
    },
    **{name: lines[0] for name, lines in WITH_FLAGS.items()},
    "distill on samples": WITH_FLAGS["distill"][2],
}
"""Command lines of every command that takes keys of the configuration."""


@pytest.fixture(autouse=True)
def installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command asks once which trainers are installed; a thousand words asked one after the other need not ask again."""
    monkeypatch.setattr(find_trainer, "list_trainer_names", functools.cache(find_trainer.list_trainer_names))


def words() -> set[str]:
    known = read_foreign_keys()
    of_schema = {(attribute.alias or attribute.name) for _, schema in tables() for attribute in attrs.fields(schema)}
    return {*known.of_any, *known.of_rl, *known.not_here, *of_schema}


def hints(command: EngineCommand, line: list[str]) -> dict[str, str]:
    meant = {word: command.find_meant_option(f"--{word.replace('_', '-')}", line) for word in words()}
    return {word: hint for word, hint in meant.items() if hint is not None}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_hint_names_an_option_of_the_command(name) -> None:
    options = {option for param in COMMANDS[name].params for option in param.opts}
    takes_keys = any(param.name == "overrides" for param in COMMANDS[name].params)
    for word, hint in hints(COMMANDS[name], []).items():
        named = re.findall(r"^Did you mean (--[a-z-]+)", hint)
        assert set(named) <= options, (word, hint)
        assert named or takes_keys, (word, hint)


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_hint_names_a_key_that_the_command_takes(command, inputs, line) -> None:
    name = next(name for name in (" ".join(line[:2]), line[0]) if name in COMMANDS)
    values = values_of_the_schema()
    keys_of_hints = [re.search(r"write ([a-z_.]+)=", hint) for hint in hints(COMMANDS[name], line).values()]
    keys = sorted({match[1] for match in keys_of_hints if match is not None} & values.keys())
    # one key that nobody knows: whatever else is right, nothing starts
    outcome = command(*line, *add_texts(line, [f"{key}={values[key]}" for key in keys] + ["utter_nonsense=1"]))
    assert outcome.code in (2, 3)
    refusals = ("is nothing that", "is a table of", "selects", "is of trainer")
    assert [row for row in outcome.err.splitlines() if any(refusal in row for refusal in refusals) and "nonsense" not in row] == []


@pytest.mark.parametrize(
    ("line", "option", "cause"),
    [
        (["evaluate", "trained"], "--limit", None),
        (["evaluate", "trained"], "--batch-size", None),
        (["evaluate", "trained"], "--group-size", None),
        (["data", "preview", "sft.toml"], "--tasks", None),
        (["data", "preview", "sft.toml"], "--batch-size", "write training.batch_size=VALUE"),
        (["env", "show", "function"], "--seed", None),
        (["run", "rl.toml"], "--batch-size", "write rl.groups=VALUE"),
        (["run", "sft.toml"], "--batch-size", "write training.batch_size=VALUE"),
        (WITH_FLAGS["rl"][0], "--batch-size", "Did you mean --groups (it counts tasks, those words attempts"),
    ],
)
def test_examples(command, inputs, line, option, cause) -> None:
    answer = command(*line, option, "3").last_line
    assert (cause or f"No such option '{option}'") in answer
