"""Structure raw tables into the schema's classes, and collect every mistake with the file and line (or the option) it comes from."""

import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from skyrl_engine.config.checks import cross_checks
from skyrl_engine.config.converter import refusals, strict_converter, unknown_key
from skyrl_engine.config.find_trainer import find_trainer, list_trainer_names
from skyrl_engine.config.foreign_keys import RL, explain_path
from skyrl_engine.config.reading.origins import KeyPath, Origin, format_key, leaves, nearest
from skyrl_engine.config.reading.places import absolute_place, with_absolute_places
from skyrl_engine.config.reading.sources import RawConfig
from skyrl_engine.config.schema import KIND, EngineConfig, MissingTable, ObserverTable, PluginTable, TrainingConfig
from skyrl_engine.config.schema.metadata import iterate_unread_fields
from skyrl_engine.config.sections import Section, sections
from skyrl_engine.config.trainers import DEFAULT_TRAINER, TRAINERS, Trainer, owners_of
from skyrl_engine.config.wording import RefusedError, choices, format_value, wrong_kind
from skyrl_engine.errors import ConfigError, Problem
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.kinds import KINDS, TABLES, Kind


@frozen
class Structured:
    """Sections of a configuration by top-level key, and `problems` with the rest. A section that a run does not have is left out."""

    sections: Mapping[str, Any]
    problems: tuple[Problem, ...]

    def config(self) -> EngineConfig:
        """The whole configuration. Raises ConfigError with every problem."""
        if self.problems:
            raise ConfigError(self.problems)
        selected = {name: self.sections[name] for name in TABLES if name in self.sections}
        names = [field.name for field in attrs.fields(EngineConfig) if field.name not in ("selected", "trainer_options")]
        tables = {name: self.sections.get(name, MissingTable(name)) for name in names}
        trainer = str(self.sections.get("trainer"))
        own = None if trainer in TRAINERS else self.sections.get(trainer.rpartition(":")[2])
        return EngineConfig(selected=selected, trainer_options=own, **tables)


def structure(raw: RawConfig, need: Collection[str] | None = None, also: Collection[str] = ()) -> Structured:
    """Check every table on its own, then tables against each other.

    `need` names those required tables that must be given; None: all that the engine and the chosen trainer require. `also` names kinds of
    plugin that the caller uses in addition to the trainer's, where the configuration has their tables.
    """
    if (problem := _of_other_command(raw, sections())) is not None:
        return Structured({}, (problem, *raw.problems))
    trainer, problems = _trainer(raw)
    known = sections(trainer)
    problems = [*raw.problems, *problems]
    names = [name for name, section in known.items() if trainer is None or section.belongs_to(trainer)]
    for key in raw.table:
        problems += _unknown(raw, key, names, trainer) if key not in known else []
    tables: dict[str, Any] = {} if trainer is None else {"trainer": raw.table.get("trainer", DEFAULT_TRAINER)}
    for name, section in known.items():
        if name == "trainer":
            continue
        if trainer is not None and not section.belongs_to(trainer) and not (name in also and name in raw.table):
            problems += _all_foreign(raw, name, trainer, section.kind) if name in raw.table else []
            continue
        demanded = trainer is not None if need is None else name in need
        if section.required and name not in raw.table and not demanded:
            continue
        table = raw.table.get(name, {})
        structured: Any
        if section.listed:
            structured, mistakes = _plugin_tables(raw, section.schema, raw.table.get(name, []), (name,))
        elif section.kind is not None:
            structured, mistakes = _plugin_table(raw, section.schema, table, (name,), section.kind.default)
            mistakes += [] if trainer is None else _foreign_lists(raw, section, table, trainer)
        elif name == "observers":
            structured, mistakes = _observers(raw, table)
        else:
            structured, mistakes = structure_table(section.schema, table, (name,), raw)
        problems += mistakes
        if structured is not None:
            tables[name] = structured
    training = tables.get("training")
    if isinstance(training, TrainingConfig) and training.steps is None and training.epochs is None:
        tables["training"] = attrs.evolve(training, epochs=1.0)
    problems += cross_checks(tables, raw.origins)
    return Structured(tables, tuple(problems))


def _of_other_command(raw: RawConfig, known: Collection[str]) -> Problem | None:
    """Return the problem of a file whose tables are all those of commands that other distributions add, such as `[serve]`; None for any other.

    Nothing else is asked of it: a run's tables are missing because it is no run.
    """
    from skyrl_engine.registry.discovery import discover_commands

    if not raw.written or any(key in known for key in raw.written):
        return None
    commands = {record.name: record for record in discover_commands()}
    if not all(key in commands for key in raw.written):
        return None
    key = next(iter(raw.written))
    cause = f"is a table of the command `skyrl-engine {key}` ({commands[key].distribution}), and no run"
    return _problem(raw, (key,), RefusedError(cause, f"Write `skyrl-engine {key} {raw.path}`"))


def _trainer(raw: RawConfig) -> tuple[Trainer | None, list[Problem]]:
    """Return the chosen trainer, or None and the problem with the choice; then tables of every trainer are checked."""
    chosen = raw.table.get("trainer", DEFAULT_TRAINER)
    if isinstance(chosen, str) and (trainer := find_trainer(chosen)) is not None:
        return trainer.for_tables(raw.table), []
    if not isinstance(chosen, str):
        return None, _other_words(raw, "trainer") or [_problem(raw, ("trainer",), wrong_kind(chosen, str))]
    names = list_trainer_names()
    remedy = did_you_mean(chosen, names, show=format_value) or f"Choose one of {choices(names)}"
    return None, [_problem(raw, ("trainer",), RefusedError(f"there is no trainer {format_value(chosen)}", remedy))]


def _unknown(raw: RawConfig, key: str, known: Collection[str], trainer: Trainer | None) -> list[Problem]:
    if trainer is not None and owners_of(key):
        return _all_foreign(raw, key, trainer, None)
    others = (name for name in list_trainer_names() if trainer is not None and name != trainer.name)
    if trainer is not None and key in (name.rpartition(":")[2] for name in others):
        return [_foreign(raw, key, trainer, None, [key])]
    return _other_words(raw, key) or [_problem(raw, (key,), unknown_key(key, known))]


def _other_words(raw: RawConfig, name: str) -> list[Problem]:
    """Return the problems of those keys inside a table of another engine whose meaning here is known."""
    if not isinstance(table := raw.table.get(name), Mapping):
        return []
    return [
        _problem(raw, path, RefusedError("is a key of another engine", meaning))
        for path, _ in leaves(table, (name,))
        if (meaning := _meaning(raw, path)) is not None
    ]


def _meaning(raw: RawConfig, path: KeyPath) -> str | None:
    """Return what sets here what a key elsewhere sets: by a word of other engines, or in another table."""
    chosen = raw.table.get("trainer", DEFAULT_TRAINER)
    trainer = find_trainer(chosen) if isinstance(chosen, str) else None
    sentence = explain_path(path, RL) if trainer is None or trainer.name == RL else None
    if sentence is not None:
        return sentence
    home = home_of(path[-1], trainer)
    return f"Did you mean {home}?" if home else explain_path(path)


def _meanings_inside(raw: RawConfig, path: KeyPath) -> str | None:
    """Return the meanings of what a table of another engine holds."""
    table: Any = raw.table
    for name in path:
        table = table[name] if isinstance(name, int) or name in table else None
        if table is None:
            return None
    meanings = (_meaning(raw, inner) for inner, _ in leaves(table, path)) if isinstance(table, Mapping) else ()
    return ". ".join(dict.fromkeys(meaning for meaning in meanings if meaning is not None)) or None


def _all_foreign(raw: RawConfig, name: str, trainer: Trainer, kind: Kind | None) -> list[Problem]:
    """Return the problem of a table that belongs to another trainer, and where its keys have a meaning in this one, what that is."""
    foreign = _foreign(raw, name, trainer, kind)
    problems = _other_words(raw, name) if kind is None and trainer.name == RL else []
    return [Problem(problem.where, foreign.cause, problem.remedy) for problem in problems] or [foreign]


def _foreign(raw: RawConfig, name: str, trainer: Trainer, kind: Kind | None, owners: Sequence[str] = ()) -> Problem:
    """Return the problem of a table that belongs to another trainer; `owners` are its trainers, by default those of the engine."""
    if kind is not None:
        if (key := trainer.replaced_kinds.get(kind.name)) is not None:
            cause = f"[{name}] selects {kind.with_article}, and trainer {trainer.name} uses none where {key} is set"
            return _problem(raw, (name,), RefusedError(cause, f"Remove it, or {key}"))
        cause = f"[{name}] selects {kind.with_article}, and this run's trainer {trainer.name} uses none"
        asked = f", or set {trainer.asked_kinds[kind.name]}" if kind.name in trainer.asked_kinds else ""
        return _problem(raw, (name,), RefusedError(cause, f"Remove it{asked}, or choose another trainer"))
    owners = owners or owners_of(name)
    whose = f"trainer {owners[0]}" if len(owners) == 1 else f"the trainers {', '.join(owners[:-1])} and {owners[-1]}"
    cause = f"[{name}] is a table of {whose}, and this run's trainer is {trainer.name}"
    return _problem(raw, (name,), RefusedError(cause, f"Remove it, or set trainer = {format_value(owners[0])}"))


def _foreign_lists(raw: RawConfig, section: Section, table: Any, trainer: Trainer) -> list[Problem]:
    """Lists in a plugin's table that select plugins of a kind which this run's trainer does not use."""
    values = table if isinstance(table, Mapping) else {}
    return [
        _problem(
            raw,
            (section.name, key),
            RefusedError(f"selects {KINDS[listed.kind].with_article}, and trainer {trainer.name} uses none", "Remove it"),
        )
        for key, listed in plugin_lists(section.schema).items()
        if values.get(key) and listed.kind not in trainer.kinds
    ]


def structure_table(schema: type[Any], table: Any, path: KeyPath, raw: RawConfig) -> tuple[Any, list[Problem]]:
    """Return one table as an instance of `schema`, or None and its problems."""
    try:
        placed = with_absolute_places(schema, table, path, raw.origins)
        return strict_converter().structure(placed, schema), []
    except Exception as error:  # noqa: BLE001 -- whatever a schema's own checks raise is a problem of this table
        return None, [_problem(raw, where, refusal) for where, refusal in refusals(error, path)]


def _problem(raw: RawConfig, path: KeyPath, refusal: RefusedError) -> Problem:
    key = format_key(path)
    if refusal.about == "missing" and any(isinstance(part, int) for part in path):
        return Problem(f"{nearest(raw.origins, path[:-1])}: {key}", refusal.cause, "Set it in this entry of the list")
    if refusal.about == "missing":
        return Problem(f"{raw.label}: {key}", refusal.cause, f"Set it in the file or give {key}=... on the command line")
    remedy = refusal.remedy
    if refusal.about == "stray":
        remedy = _meaning(raw, path) or _meanings_inside(raw, path) or remedy
    return Problem(f"{nearest(raw.origins, path)}: {key}", refusal.cause, remedy)


def home_of(key: str | int, trainer: Trainer | None = None) -> str | None:
    """Return the one key of that name in any table of the schema, or of a trainer, for a key that was written into the wrong table.

    `use` has none: every table that selects something has a key of that name.
    """
    if key == "use":
        return None
    homes = [
        f"{name}.{key}"
        for name, section in sections().items()
        if section.kind is None and attrs.has(section.schema) and key in attrs.fields_dict(section.schema)
        if trainer is None or section.belongs_to(trainer)
    ]
    return homes[0] if len(homes) == 1 else None


def is_switch(key: str) -> bool:
    """Say whether "table.key" of the schema is true or false."""
    table, _, name = key.partition(".")
    section = sections().get(table)
    return section is not None and attrs.has(section.schema) and typing.get_type_hints(section.schema).get(name) is bool


def own_keys(schema: type[PluginTable]) -> tuple[str, ...]:
    """Return the keys of a plugin's table that are the engine's; every other key is an option of the plugin."""
    return tuple(attribute.name for attribute in attrs.fields(schema) if attribute.name != "options")


@frozen
class PluginList:
    """A key of a plugin table that lists further plugin tables: their class, and the kind of plugin they select."""

    schema: type[PluginTable]
    kind: str


def plugin_lists(schema: type[Any]) -> Mapping[str, PluginList]:
    """Return the keys of a table, or of the whole configuration, that hold a list of plugin tables."""
    return {
        attribute.name: PluginList(typing.get_args(attribute.type)[0], attribute.metadata[KIND])
        for attribute in attrs.fields(attrs.resolve_types(schema))
        if KIND in attribute.metadata
    }


def _plugin_table(
    raw: RawConfig, schema: type[PluginTable], table: Any, path: KeyPath, default: str | None = None
) -> tuple[PluginTable | None, list[Problem]]:
    """Structure the engine's keys and keep the plugin's options; options without `use` belong to the default plugin, if there is one."""
    if not isinstance(table, Mapping):
        header = f"[{format_key(path)}]" if isinstance(path[-1], str) else f"[[{format_key(path[:-1])}]]"
        return None, [_problem(raw, path, RefusedError(wrong_kind(table, dict).cause, f'Write {header} and use = "..." under it'))]
    lists: dict[str, tuple[PluginTable | None, ...]] = {}
    problems: list[Problem] = []
    for key, listed in plugin_lists(schema).items():
        lists[key], mistakes = _plugin_tables(raw, listed.schema, table.get(key, []), (*path, key))
        problems += mistakes
    own = {key: table[key] for key in own_keys(schema) if key in table and key not in lists}
    options = {key: value for key, value in table.items() if key not in own_keys(schema)}
    section, mistakes = structure_table(
        schema, {**({} if default is None else {"use": default}), **own, "options": options}, path, raw
    )
    return (None if section is None else attrs.evolve(section, **lists)), problems + mistakes


def _plugin_tables(
    raw: RawConfig, schema: type[PluginTable], tables: Any, path: KeyPath
) -> tuple[tuple[PluginTable | None, ...], list[Problem]]:
    """Structure a list of plugin tables. A refused entry is None, so that the others keep their places; its problem stops the configuration."""
    if not isinstance(tables, list):
        remedy = f'Write [[{format_key(path)}]] and use = "..." under it, once for each'
        return (), [_problem(raw, path, RefusedError(wrong_kind(tables, list).cause, remedy))]
    results = [_plugin_table(raw, schema, table, (*path, index)) for index, table in enumerate(tables)]
    return tuple(section for section, _ in results), [problem for _, mistakes in results for problem in mistakes]


def take_own(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keys of an observer's table that are the engine's; every other key is an option of the observer."""
    return {name: table[name] for name in attrs.fields_dict(ObserverTable) if name in table}


def _observers(raw: RawConfig, table: Any) -> tuple[Mapping[str, Mapping[str, Any]] | None, list[Problem]]:
    if not isinstance(table, Mapping):
        return None, [
            _problem(raw, ("observers",), RefusedError(wrong_kind(table, dict).cause, "Write [observers.NAME] and its options"))
        ]
    problems = []
    tables: dict[str, Mapping[str, Any]] = {}
    for name, options in table.items():
        if isinstance(options, Mapping):
            _, mistakes = structure_table(ObserverTable, take_own(options), ("observers", name), raw)
            problems += mistakes
            tables[absolute_place(name, nearest(raw.origins, ("observers", name)).folder, reference=True)] = options
        else:
            refusal = RefusedError(
                wrong_kind(options, dict).cause, "Write the references in run.observers, and options in [observers.NAME]"
            )
            problems.append(_problem(raw, ("observers", name), refusal))
    return (None if problems else tables), problems


def plain(value: Any) -> Any:
    """Return an attrs instance, or any value of a schema, as plain tables, lists and scalars that JSON and `load` read."""
    if isinstance(value, PluginTable):
        unread = {name for name, _, _ in iterate_unread_fields(value)}
        plain_values = {key: plain(getattr(value, key)) for key in own_keys(type(value)) if key not in unread}
        return {**{key: item for key, item in plain_values.items() if item not in ([], None)}, **plain(value.options)}
    if isinstance(value, EngineConfig):
        return _plain_config(value)
    if attrs.has(type(value)):
        unread = {name for name, _, _ in iterate_unread_fields(value)}
        fields = [a for a in attrs.fields(type(value)) if a.init and a.name not in unread]
        return {(a.alias or a.name): plain(getattr(value, a.name)) for a in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return plain(value.value) if hasattr(value, "value") else str(value)


def _plain_config(config: EngineConfig) -> dict[str, Any]:
    """Return the tables as a file has them: those that select plugins among the others, absent ones left out."""
    table: dict[str, Any] = {}
    for attribute in attrs.fields(EngineConfig):
        if attribute.name == "selected":
            table |= plain(config.selected)
        elif attribute.name == "trainer_options":
            if config.has("trainer_options"):
                table[config.trainer.rpartition(":")[2]] = plain(config.trainer_options)
        elif config.has(attribute.name):
            table[attribute.name] = plain(getattr(config, attribute.name))
    return table


def complete_origins(table: Mapping[str, Any], raw: RawConfig, default: Origin) -> dict[str, Origin]:
    """Return the origin of every key that holds a value in a resolved table: as given, else `default`. An empty `[table]` gives no key."""
    known = {key: origin for key, origin in raw.origins.items() if raw.table.get(key) != {}}
    origins = {}
    for path, _ in leaves(table):
        origins_above = [known[format_key(path[:end])] for end in range(len(path), 0, -1) if format_key(path[:end]) in known]
        origins[format_key(path)] = origins_above[0] if origins_above else default
    return origins
