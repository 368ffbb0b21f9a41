"""Command lines of every command that takes key=value, and the tables and keys of the schema that they are tried with."""

import json
import typing
from collections.abc import Iterator, Mapping

import attrs

from skyrl_engine.config.sections import sections
from skyrl_engine.config.structure import plugin_lists

OF_TRAINERS = {
    "run": ["run", "{trainer}.toml", "--dry-run"],
    "plan": ["plan", "{trainer}.toml"],
    "lock": ["lock", "{trainer}.toml"],
    "config show": ["config", "show", "{trainer}.toml"],
    "config check": ["config", "check", "{trainer}.toml"],
    "data preview": ["data", "preview", "{trainer}.toml"],
}
"""Commands that take any configuration, by their names; each is tried with the configuration of every trainer."""

WITH_FLAGS = {
    "sft": [["sft", "--model", "m", "--data", "d.jsonl"]],
    "preference": [["preference", "--model", "m", "--data", "d.jsonl", "--reference", "r"]],
    "reward-model": [["reward-model", "--model", "m", "--data", "d.jsonl"]],
    "rl": [
        ["rl", "--model", "m"],
        ["rl", "--model", "m", "--reward", "./reward.py:score", "--data", "d.jsonl"],
        ["rl", "--model", "m", "--env", "prompts", "--data", "d.jsonl"],
        ["rl", "--model", "m", "--env", "gymnasium:CartPole-v1", "--env", "gymnasium:Acrobot-v1", "--preset", "dapo"],
        ["rl", "--model", "m", "--rollouts", "r", "--reward-model", "r", "--preset", "ppo"],
    ],
    "distill": [
        ["distill", "--model", "m", "--data", "d.jsonl"],
        ["distill", "--model", "m", "--teacher", "t", "--data", "d.jsonl"],
        ["distill", "--model", "m", "--teacher", "t", "--prompts", "d.jsonl"],
        ["distill", "--model", "m", "--teacher", "t", "--env", "gymnasium:Acrobot-v1"],
    ],
    "evaluate": [
        ["evaluate", "--model", "m", "--reward", "./reward.py:score", "--data", "d.jsonl"],
        ["evaluate", "--model", "m", "--env", "gymnasium:Acrobot-v1"],
        ["evaluate", "trained"],
        ["evaluate", "trained", "--env", "gymnasium:Acrobot-v1", "-k", "4"],
    ],
    "chat": [["chat", "m"], ["chat", "trained"]],
    "prove": [["prove"], ["prove", "sft.toml", "--collator", "packed"]],
    "diff-backends": [["diff-backends", "--b", "fsdp"], ["diff-backends", "sft.toml", "--b", "fsdp"]],
}
"""Commands that make a configuration, or a part of one, in the ways in which their options make tables."""

OF_PLUGINS = {
    "env show": ["env", "show", "gymnasium:CartPole-v1"],
    "env try": ["env", "try", "gymnasium:CartPole-v1"],
    "plugins verify": ["plugins", "verify", "loss:ppo"],
}
"""Commands whose keys are options of one plugin."""


def tables() -> Iterator[tuple[str, type]]:
    """Yield every table of the schema by its dotted key, those inside others too; of a list of tables, the first."""
    for name, section in sections().items():
        if attrs.has(section.schema):
            yield from _inside(f"{name}.0" if section.listed else name, section.schema)


def _inside(key: str, schema: type) -> Iterator[tuple[str, type]]:
    yield key, schema
    for name, listed in plugin_lists(schema).items():
        yield from _inside(f"{key}.{name}.0", listed.schema)
    for name, hint in typing.get_type_hints(schema).items():
        for kind in typing.get_args(hint) or (hint,):
            if attrs.has(kind) and name not in plugin_lists(schema):
                yield from _inside(f"{key}.{name}.0" if typing.get_origin(hint) is tuple else f"{key}.{name}", kind)


def values_of_the_schema() -> dict[str, str]:
    """Return a value that each key of each table takes, as it is written on a command line."""
    return {
        f"{table}.{attribute.alias or attribute.name}": a_value_of(schema, attribute.name, attribute.default)
        for table, schema in tables()
        for attribute in attrs.fields(schema)
        if attribute.name != "options" and attribute.name not in plugin_lists(schema)
        if not any(attrs.has(kind) for kind in typing.get_args(typing.get_type_hints(schema)[attribute.name]))
    }


def a_value_of(schema: type, name: str, default: object) -> str:
    hint = typing.get_type_hints(schema)[name]
    kinds = {
        typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,))
    }
    if isinstance(default, (bool, int, float, str)):
        return json.dumps(default)
    for kind, value in ((int, "1"), (float, "1.0"), (bool, "true"), (str, '"x"'), (tuple, "[]"), (Mapping, "{}")):
        if kind in kinds:
            return value
    return '"x"'


def add_texts(line: list[str], texts: list[str]) -> list[str]:
    return [part for text in texts for part in ("--set", text)] if line[0] in ("evaluate", "env") else texts
