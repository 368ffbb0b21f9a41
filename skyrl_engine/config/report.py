"""Write configurations as TOML, and the reference page of every key."""

import ast
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import tomli_w

from skyrl_engine.config.converter import NONE_WORD
from skyrl_engine.config.foreign_keys import words, words_of_rl
from skyrl_engine.config.presets import preset_of
from skyrl_engine.config.schema import PLACE, EngineConfig, ObserverTable
from skyrl_engine.config.sections import sections
from skyrl_engine.config.structure import plugin_lists
from skyrl_engine.config.trainers import TRAINERS, owners_of
from skyrl_engine.config.wording import bounds_in_words, choices, describe_type, format_value
from skyrl_engine.registry.known import list_first_party


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a plain table as TOML text; a key without a value is written as the word "none"."""
    return tomli_w.dumps(_without_none(table))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return NONE_WORD if value is None else value


def key_meanings(schema: type[Any]) -> dict[str, str]:
    """The text under each field of an attrs class, its own and inherited, read from the source; empty where there is no source."""
    bases = [base for base in reversed(schema.__mro__) if attrs.has(base)]
    return {name: text for base in bases for name, text in _own_meanings(base).items()}


def _own_meanings(schema: type[Any]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(schema))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            meanings[statement.target.id] = inspect.cleandoc(following.value.value)
    return meanings


_INTRODUCTION = """\
# Configuration reference

<!-- Written by `skyrl_engine.config.report.configuration_reference()`; change the schema, not this page. -->

A configuration file is TOML (`.toml`) or YAML (`.yaml`, `.yml`). On the command line `section.key=value` replaces what the file
says, and an option such as `--loss` replaces both. The value of an override is a TOML value; what is not one is taken as text, so
`loss.use=focal` needs no quotes. It reaches into lists of tables by position, from 0, those that options make too: after
`--env`, `environments.0.weight=2` is the weight of that environment. No key is dropped: one that says otherwise than an option, that
nothing takes, or that the command does not read is refused by its name. `skyrl-engine config show` prints every key with the place it
came from.

- Nothing is converted: `"1"` is text, `1` is not `true`, `2.0` is not a whole number. A whole number is accepted where a number is wanted.
- TOML has no null. `"none"` (in YAML also `null`) means no value, wherever a key below may have none.
- YAML is read by the rules of version 1.2: `1e-6` is a number, `no` and `on` are text.
- A key marked with (place) names a file or folder, or may. When it starts with `./` or `../` it is relative to the folder of the
  configuration file that says so, or to the current folder on the command line. Every other path is relative to the current folder.
- Unknown keys are mistakes. All mistakes are reported together.
"""

_PLUGIN_TABLE = """\
`use` selects the plugin: `name`, `distribution:name` where several distributions offer the name, or `./file.py:name` for a local file
(place). Every other key is an option of that plugin; `skyrl-engine plugins show {kind}:{use}` lists them.

"""

_LISTED = "One table for each, as many as you like.\n"


_OTHER_WORDS = """
## Words of other trainers

The keys of this configuration, and the words under which other trainers have them. Gradients are accumulated without a key of their own:
a step takes `training.batch_size` samples over all ranks, a rank computes `training.micro_batch_rows` rows at once, and the number of
micro-batches of a step follows: `batch_size / (micro_batch_rows * ranks)`.

| key | elsewhere |
|---|---|
"""


_WORDS_OF_RL = """
Words of reinforcement. Where trainer is rl, they come first: a `train_batch_size` counts tasks there.
[Options of reinforcement](migration-rl.md) has them engine by engine.

| key | elsewhere |
|---|---|
"""


def configuration_reference() -> str:
    """The text of `docs/reference/configuration.md`: every table and key with type, default and meaning."""
    parts = [_INTRODUCTION]
    for name, section in sections().items():
        schema = section.schema
        parts.append(
            "\n## trainer\n\n" if name == "trainer" else f"\n## [[{name}]]\n\n" if section.listed else f"\n## [{name}]\n\n"
        )
        if name == "trainer":
            meaning = key_meanings(EngineConfig)[name]
            parts.append(_table([(name, f"one of {choices(TRAINERS)}", format_value(section.default), meaning)]))
        elif section.kind is not None:
            kind = section.kind
            first = kind.default or list_first_party(kind.name)[0]
            parts.append(_LISTED if section.listed else "")
            parts.append(_PLUGIN_TABLE.format(kind=kind.name, use=first))
            use = "required" if kind.default is None else format_value(kind.default)
            parts.append(
                _table([("use", "text", use, f"The {kind.name.replace('_', ' ')}."), *_rows_without(schema, "use", "options")])
            )
            for key, listed in plugin_lists(schema).items():
                parts.append(f"\n### [[{name}.{key}]]\n\n{inspect.getdoc(listed.schema)}\n\n")
                parts.append(_table(_rows_without(listed.schema, "options")))
        elif attrs.has(schema):
            owners = " and ".join(f"`{trainer}`" for trainer in owners_of(name))
            whose = f" A table of trainer {owners}." if owners else ""
            parts.append(f"{inspect.getdoc(schema)}{whose}\n\n")
            parts.append(_table(_rows(schema)))
            for key, inner, is_list in _tables_inside(schema):
                header = f"[[{name}.{key}]]" if is_list else f"[{name}.{key}]"
                parts.append(f"\n### {header}\n\n{inspect.getdoc(inner)}\n\n")
                parts.append(_table(_rows(inner)))
        else:
            parts.append(
                f"One table for each observer that `run.observers` names: `[observers.NAME]`. {inspect.getdoc(ObserverTable)}\n\n"
            )
            parts.append(_table(_rows(ObserverTable)))
    parts.append(_OTHER_WORDS)
    parts += _words(words())
    parts.append(_WORDS_OF_RL)
    parts += _words(words_of_rl())
    return "".join(parts)


def _words(by_key: Mapping[str, Sequence[str]]) -> Iterator[str]:
    return (f"| `{key}` | {', '.join(f'`{word}`' for word in known)} |\n" for key, known in by_key.items())


def _rows(schema: type[Any]) -> Iterator[tuple[str, str, str, str]]:
    meanings = key_meanings(schema)
    for attribute in attrs.fields(attrs.resolve_types(schema)):
        meaning = " ".join(meanings.get(attribute.name, "").split())
        if attribute.metadata.get(PLACE):
            meaning += " (place)"
        yield attribute.alias or attribute.name, _describe_kind(attribute), default_text(attribute), meaning


def _rows_without(schema: type[Any], *keys: str) -> list[tuple[str, str, str, str]]:
    return [row for row in _rows(schema) if row[0] not in keys]


def _tables_inside(schema: type[Any]) -> Iterator[tuple[str, type[Any], bool]]:
    """Yield keys that hold a table of keys of their own, or none, with its class; True says that they hold a list of such tables."""
    for attribute in attrs.fields(attrs.resolve_types(schema)):
        for kind in (attribute.type, *typing.get_args(attribute.type)):
            if attrs.has(kind):
                yield attribute.name, kind, typing.get_origin(attribute.type) is tuple


def _describe_kind(attribute: "attrs.Attribute[Any]") -> str:
    """Type and bounds: "a whole number, at least 1, or none"."""
    words, allowed = key_kind(attribute.type), bounds_in_words(attribute.validator)
    if not allowed:
        return words
    number, none, _ = words.partition(" or none")
    return f"{number}, {allowed}{',' if none else ''}{none}"


def key_kind(kind: Any) -> str:
    """A key's type in words, with what a list or a table holds: "a list (each: text)"."""
    words, arguments = describe_type(kind), typing.get_args(kind)
    if words in ("a list", "a table") and arguments:
        item = arguments[1] if words == "a table" else arguments[0]
        return f"{words} (each: {key_kind(item)})"
    return words


def default_text(attribute: "attrs.Attribute[Any]") -> str:
    """A key's default as TOML writes it, or `required`."""
    default = attribute.default
    if default is attrs.NOTHING:
        return "required"
    factory = getattr(default, "factory", None)
    if factory is not None:
        if getattr(default, "takes_self", False):
            return "computed"
        default = factory()
    if default is None:
        return NONE_WORD
    if isinstance(default, (tuple, list)):
        return f"[{', '.join(format_value(item) for item in default)}]"
    return "{}" if default == {} else format_value(default)


def default_of(key: str, trainer: str | None, chosen: str | None = None) -> str:
    """Return the default of a dotted key in words; that of a plugin's `use` is the chosen preset's (None: the trainer's default one)."""
    name, _, rest = key.partition(".")
    section = sections()[name]
    if section.kind is not None and rest == "use":
        used = {} if trainer is None else preset_of(trainer, chosen)
        return str(used.get(name, {}).get("use") or section.kind.default or NONE_WORD)
    if "." in rest:
        return NONE_WORD  # a key of a table that is not there
    attribute = attrs.fields_dict(attrs.resolve_types(section.schema))[rest]
    text = default_text(attribute)
    return NONE_WORD if text == "required" else text.strip('"')


def _table(rows: "Iterator[tuple[str, str, str, str]] | list[tuple[str, str, str, str]]") -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{key}` | {kind} | `{default}` | {meaning} |" for key, kind, default, meaning in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # python -m skyrl_engine.config.report > docs/reference/configuration.md
    sys.stdout.write(configuration_reference())
