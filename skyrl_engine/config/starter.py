"""A first configuration file: the keys that were chosen, and beside them, as comments, those that are mostly changed next."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import tomli_w

from skyrl_engine.config.report import key_meanings, to_toml
from skyrl_engine.config.sections import sections

_WIDTH: Final = 110

_OF_DATASETS: Final = (
    "model.dtype",
    "data.max_length",
    "training.epochs",
    "training.batch_size",
    "training.micro_batch_tokens",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "checkpoint.every",
    "checkpoint.keep",
    "run.directory",
    "run.seed",
)
MOSTLY_CHANGED: Final[Mapping[str, Sequence[str]]] = {
    "sft": (*_OF_DATASETS[:2], "data.loss_on", *_OF_DATASETS[2:]),
    "preference": ("preference.preset", *_OF_DATASETS),
    "reward_model": _OF_DATASETS,
    "rl": (
        "model.dtype",
        "rl.preset",
        "rl.steps",
        "rl.groups",
        "rl.group_size",
        "rl.max_prompt_tokens",
        "rl.max_tokens",
        "rl.temperature",
        "optimizer.learning_rate",
        "evaluation.every",
        "checkpoint.every",
        "checkpoint.keep",
        "run.directory",
        "run.seed",
    ),
}
"""Keys by trainer that a first file shows with their defaults."""


def write_starter(trainer: str, tables: Mapping[str, Any], resolved: Mapping[str, Any]) -> str:
    """Return a configuration file as TOML: `tables` as they are, and the keys of MOSTLY_CHANGED that they leave out, as comments.

    `resolved` is the configuration that the tables make, whose values the comments state.
    """
    parts = [f"trainer = {_toml(trainer)}\n"]
    shown = [key.split(".") for key in MOSTLY_CHANGED[trainer]]
    for name in dict.fromkeys([*tables, *(table for table, _ in shown)]):
        given = tables.get(name, {})
        if isinstance(given, list):
            parts += [f"[[{name}]]\n{tomli_w.dumps(entry)}" for entry in given]
            continue
        inner = {key: value for key, value in given.items() if isinstance(value, Mapping)}
        plain = {key: value for key, value in given.items() if key not in inner}
        left_out = {key: resolved[name][key] for table, key in shown if table == name and key not in given}
        parts.append("\n".join([f"[{name}]", *_lines(name, plain, left_out)]) + "\n")
        parts += [f"[{name}.{key}]\n{tomli_w.dumps(value)}" for key, value in inner.items()]
    return "\n".join(parts)


def _lines(name: str, given: Mapping[str, Any], left_out: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table, each key after its meaning."""
    meanings = key_meanings(sections()[name].schema)
    for key, value in {**given, **left_out}.items():
        yield from textwrap.wrap(_first_sentence(meanings.get(key, "")), _WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield f"{'' if key in given else '# '}{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    return to_toml({"key": value}).strip().partition("= ")[2]


def _first_sentence(text: str) -> str:
    text = " ".join(text.split())
    return text.partition(". ")[0].removesuffix(".") + "." if text else ""
