"""The configuration as JSON Schema (draft 2020-12), for editors and other tools. `load` and `resolve` remain the authority."""

import enum
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

import attrs

from skyrl_engine.config.converter import NONE_WORD
from skyrl_engine.config.find_trainer import find_trainer, list_trainer_names
from skyrl_engine.config.report import key_meanings
from skyrl_engine.config.schema import EngineConfig, ObserverTable, PluginTable
from skyrl_engine.config.sections import Section, sections
from skyrl_engine.config.structure import own_keys, plain, plugin_lists
from skyrl_engine.config.trainers import DEFAULT_TRAINER, TRAINERS, Trainer, owners_of
from skyrl_engine.config.wording import bounds, list_allowed_values
from skyrl_engine.errors import PluginError

if TYPE_CHECKING:
    from skyrl_engine.registry.loader import LoadedPlugin

_SCALARS: Mapping[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "string", type(None): "null"}
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


def config_schema(plugins: "Sequence[LoadedPlugin]" = ()) -> dict[str, Any]:
    """JSON Schema of a configuration file. With `plugins`, a table that selects one of them admits that plugin's options only."""
    known = sections()
    others = [trainer for name in list_trainer_names() if name not in TRAINERS and (trainer := _find_working(name)) is not None]
    own = {trainer.name: sections(trainer)[trainer.name] for trainer in others if trainer.options is not None}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "skyrl_engine configuration",
        "type": "object",
        "properties": {name: _section(section, plugins) for name, section in {**known, **own}.items()},
        "additionalProperties": False,
        "required": [name for name, section in known.items() if section.required and not owners_of(name)],
        "allOf": [_of_trainer(trainer, {**known, **own}) for trainer in (*TRAINERS.values(), *others)],
    }


def _find_working(name: str) -> Trainer | None:
    """Return a trainer of another distribution; None for one that cannot be used, which a schema does without."""
    try:
        return find_trainer(name)
    except PluginError:
        return None


def _section(section: Section, plugins: "Sequence[LoadedPlugin]") -> dict[str, Any]:
    if section.name == "trainer":
        return {"enum": list_trainer_names(), "description": key_meanings(EngineConfig)["trainer"], **_default(section.default)}
    if section.name == "observers":
        own = table_schema(ObserverTable)["properties"]
        return {"type": "object", "additionalProperties": {"type": "object", "properties": own}}
    if section.kind is not None and section.listed:
        return {"type": "array", "items": _plugin_table(section.schema, section.kind.name, plugins)}
    if section.kind is not None:
        return _plugin_table(section.schema, section.kind.name, plugins, section.kind.default)
    return {**table_schema(section.schema), **({} if section.required else _default(section.default))}


def _of_trainer(trainer: Trainer, known: Mapping[str, Section]) -> dict[str, Any]:
    """Return the rule for this trainer: the tables that a configuration needs, and those it cannot have."""
    chosen: dict[str, Any] = {"properties": {"trainer": {"const": trainer.name}}}
    if trainer.name != DEFAULT_TRAINER:
        chosen["required"] = ["trainer"]
    tables = {*trainer.tables, trainer.name}
    required = [name for name, section in known.items() if section.required and name in tables]
    widest = attrs.evolve(trainer, kinds=(*trainer.kinds, *trainer.asked_kinds))
    foreign = [name for name, section in known.items() if not section.belongs_to(widest) or _is_of_another(section, trainer)]
    return {"if": chosen, "then": {"required": required, "properties": dict.fromkeys(foreign, False)}}


def _is_of_another(section: Section, trainer: Trainer) -> bool:
    """Say whether a section is the own table of another distribution's trainer, and not of this one."""
    return section.name not in (*sections(), trainer.name)


def table_schema(schema: type[Any]) -> dict[str, Any]:
    """JSON Schema of one attrs class: no other keys, required keys, defaults, bounds, and the text under each field."""
    meanings = key_meanings(schema)
    properties, required = {}, []
    for attribute in attrs.fields(attrs.resolve_types(schema)):
        if not attribute.init:
            continue
        key = attribute.alias or attribute.name
        entry = _type_schema(attribute.type)
        _add_bounds(entry, attribute.validator)
        named = list_allowed_values(attribute.validator)
        if named and "type" in entry:
            entry["enum"] = [plain(value) for value in named]
        if attribute.name in meanings:
            entry["description"] = meanings[attribute.name]
        if attribute.default is attrs.NOTHING:
            required.append(key)
        else:
            entry |= _default(attribute.default)
        properties[key] = entry
    table = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**table, "required": required} if required else table


def _plugin_table(
    schema: type[PluginTable], kind: str, plugins: "Sequence[LoadedPlugin]", default: str | None = None
) -> dict[str, Any]:
    own = table_schema(schema)
    table: dict[str, Any] = {"type": "object", "properties": {key: own["properties"][key] for key in own_keys(schema)}}
    if default is None:
        table["required"] = own["required"]
    else:
        table["properties"]["use"]["default"] = default
    for key, listed in plugin_lists(schema).items():
        table["properties"][key]["items"] = _plugin_table(listed.schema, listed.kind, plugins)
    cases = []
    for plugin in (plugin for plugin in plugins if plugin.record.kind == kind):
        names: list[str] = list(dict.fromkeys([plugin.record.name, plugin.record.reference]))
        options = {} if plugin.schema is None else table_schema(plugin.schema)
        # `use` may be left out for the default plugin, hence no "required" there.
        required = {} if plugin.record.name == default else {"required": ["use"]}
        cases.append(
            {
                "if": {"properties": {"use": {"enum": names}}, **required},
                "then": {
                    "properties": {**dict.fromkeys(own_keys(schema), True), **options.get("properties", {})},
                    "required": options.get("required", []),
                    "additionalProperties": False,
                },
            }
        )
    return {**table, "allOf": cases} if cases else table


def _type_schema(kind: Any) -> dict[str, Any]:
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Annotated:
        return _type_schema(arguments[0])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        options = [_type_schema(argument) for argument in arguments]
        if type(None) in arguments:
            options.append({"const": NONE_WORD})
        return {"anyOf": options}
    if not isinstance(origin, type):
        return {}
    if issubclass(origin, enum.Enum):
        return {"enum": [member.value for member in origin]}
    if attrs.has(origin):
        return table_schema(origin)
    if issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type_schema(arguments[1]) if arguments else True}
    if origin is tuple and arguments and arguments[-1] is not ...:
        items = [_type_schema(argument) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if issubclass(origin, Collection):
        return {"type": "array", "items": _type_schema(arguments[0]) if arguments else True}
    return {}


def _default(default: Any) -> dict[str, Any]:
    factory = getattr(default, "factory", None)
    if factory is not None:
        return {} if getattr(default, "takes_self", False) else {"default": plain(factory())}
    return {"default": plain(default)}


def _add_bounds(entry: dict[str, Any], validator: Any) -> None:
    """Write the bounds of attrs' own number and length validators into an entry, or into each of the types that it may have."""
    for inner in entry.get("anyOf", [entry]):
        if inner.get("type") in ("integer", "number"):
            inner.update({_BOUNDS[sign]: bound for sign, bound in bounds(validator)})
        shortest = _shortest(validator)
        if shortest is not None and inner.get("type") in ("string", "array"):
            inner["minLength" if inner["type"] == "string" else "minItems"] = shortest


def _shortest(validator: Any) -> int | None:
    """Return the bound of attrs' length validator: alone, combined or inside `optional`."""
    own: int | None = getattr(validator, "min_length", None)
    if own is not None:
        return own
    inner = (*getattr(validator, "_validators", ()), *([nested] if (nested := getattr(validator, "validator", None)) else []))
    return next((bound for nested in inner if (bound := _shortest(nested)) is not None), None)
