"""A checked configuration with its plugins: selected, loaded, and their options structured by their own schemas."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from skyrl_engine.config.find_trainer import find_trainer
from skyrl_engine.config.locking import describe_plugins, locked_place
from skyrl_engine.config.presets import explain_preset, with_preset
from skyrl_engine.config.reading.origins import DEFAULT, KeyPath, Origin, format_key, leaves, nearest
from skyrl_engine.config.reading.places import absent_places, with_absolute_places
from skyrl_engine.config.reading.sources import RawConfig, from_dict
from skyrl_engine.config.schema import EngineConfig, ObserverTable, PluginsConfig, PluginTable, RunConfig
from skyrl_engine.config.sections import sections as list_sections
from skyrl_engine.config.structure import complete_origins, own_keys, plain, plugin_lists, structure, structure_table, take_own
from skyrl_engine.config.trainers import DEFAULT_TRAINER
from skyrl_engine.config.trust.gate import Gate, hash_code_files
from skyrl_engine.config.trust.marks import code_in
from skyrl_engine.config.wording import format_value
from skyrl_engine.contracts.kinds.backend import PARALLEL_SIZES
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.observer import OnError
from skyrl_engine.contracts.values.roles import Role
from skyrl_engine.errors import ConfigError, ContractError, PluginError, PluginNotFoundError, Problem, UntrustedCodeError
from skyrl_engine.near_words import did_you_mean, find_near_word
from skyrl_engine.object_store.address import PLACE_OF_SECRETS, hide_secrets, is_address
from skyrl_engine.registry.code_files import NamedCode, limit_code
from skyrl_engine.registry.kinds import AUTO, KINDS, TABLES
from skyrl_engine.registry.plugin_lock import LockedPlugin, PluginLock

if TYPE_CHECKING:
    from skyrl_engine.registry.bound_plugin import BoundPlugin
    from skyrl_engine.registry.loader import LoadedPlugin
    from skyrl_engine.registry.record import PluginRecord
    from skyrl_engine.registry.resolve import Registry


@frozen
class SelectedPlugin:
    """A plugin a run uses: loaded, with its options as its schema's instance (None without schema) and as a plain table, defaults included.

    `coefficient` is that of a term of the objective, None for every other plugin; `on` the role of samples that a term is limited to. `code` is
    what its options name, which is run only as it was when the plugin was selected. `on_error` is what its table says of an observer's failure.
    """

    loaded: "LoadedPlugin"
    options: object | None
    table: Mapping[str, Any]
    coefficient: float | None = None
    on: Role | None = None
    code: NamedCode = attrs.Factory(NamedCode)
    on_error: OnError | None = None

    def make(self, context: FactoryContext) -> Any:
        """Build the product; raises PluginBrokenError or ContractError, and PluginBlockedError for code that may not run."""
        with limit_code(self.code):
            return self.loaded.make(self.options, context)

    def bind(self, place: str, context: FactoryContext) -> "BoundPlugin[Any]":
        """Build the product and set it to work at `place` of the configuration. Raises as `make` does."""
        from skyrl_engine.registry.bound_plugin import BoundPlugin
        from skyrl_engine.registry.owner import Owner

        record = self.loaded.record
        coefficient = 1.0 if self.coefficient is None else self.coefficient
        return BoundPlugin(self.make(context), Owner.of(record), place, record.name, coefficient, self.on)

    def on_one_rank(self) -> "SelectedPlugin":
        """Return the backend as a single rank runs it: its options without parallel sizes."""
        return self.of(
            self.loaded.record, {key: value for key, value in self.table.items() if key not in PARALLEL_SIZES}, "one rank"
        )

    def to_lock_entry(self) -> dict[str, Any]:
        """Everything another process needs to rebuild this selection, as JSON holds it."""
        lock = {"record": self.loaded.record.to_lock_entry(), "options": json.loads(json.dumps(self.table))}
        more = {
            "coefficient": self.coefficient,
            "on": self.on,
            "code": None if self.code == NamedCode() else self.code.to_lock_entry(),
            "on_error": self.on_error,
        }
        return {**lock, **{key: value for key, value in more.items() if value is not None}}

    @classmethod
    def from_lock(cls, lock: Mapping[str, Any]) -> "SelectedPlugin":
        """Rebuild on another process. Raises PluginError when the plugin here is not the locked one, or refuses the locked options."""
        from skyrl_engine.registry.resolve import PluginRecord

        plugin = cls.of(PluginRecord.from_lock(dict(lock["record"])), lock["options"], "plugin lock")
        code = NamedCode(**lock.get("code", {}))
        return attrs.evolve(
            plugin, coefficient=lock.get("coefficient"), on=lock.get("on"), code=code, on_error=lock.get("on_error")
        )

    @classmethod
    def of(cls, record: "PluginRecord", options: Mapping[str, Any], origin: str) -> "SelectedPlugin":
        """The plugin with options that `origin` gave, outside of a configuration. Raises ConfigError or PluginError."""
        from skyrl_engine.registry.loader import load

        return cls.of_loaded(load(record), options, origin)

    @classmethod
    def of_loaded(cls, loaded: "LoadedPlugin", options: Mapping[str, Any], origin: str) -> "SelectedPlugin":
        """A plugin that is loaded already, with options that `origin` gave. Raises ConfigError."""
        kind = loaded.record.kind
        structured, problems = _options(loaded, options, (kind,), from_dict({kind: options}, origin))
        if problems:
            raise ConfigError(problems)
        return cls(loaded, structured, _plain_options(structured))


@frozen
class Assumptions:
    """Assumptions of a plan in the place of this machine and of the data: GPUs of `device_bytes` bytes each, rows of `lengths` tokens."""

    device_bytes: int | None = None
    lengths: tuple[int, ...] | None = None


@frozen
class ResolvedConfig:
    """A configuration ready to run. `plugins` by their place in the configuration: by kind, and `loss.terms[0]`, `loss.corrections[0]` and on;
    `origins` has an entry for every key of `as_dict()`. A plugin that the engine is to choose is not there yet (`config.automatic`).
    `assumed` is for a plan alone: a run has its own machine and data.
    """

    config: EngineConfig
    registry: "Registry"
    plugins: Mapping[str, SelectedPlugin]
    observers: tuple[SelectedPlugin, ...]
    origins: Mapping[str, Origin]
    assumed: Assumptions = Assumptions()

    def as_dict(self) -> dict[str, Any]:
        """The whole configuration, defaults and plugin options included, in plain values; `from_dict` reads it back."""
        return _as_dict(self.config, self.plugins, self.observers)

    def lock_plugins(self, *, source: str, remedy: str) -> PluginLock:
        """Return the lock of the plugins as they are here; `source` and `remedy` as in `PluginLock`."""
        selected = [*self.plugins.items(), *(("", observer) for observer in self.observers)]
        records = {locked_place(place, plugin.loaded.record): plugin.loaded.record for place, plugin in selected}
        tables, kinds = self.config.selected, [kind for kind in KINDS if KINDS[kind].automatic is not None]
        automatic = [kind for kind in kinds if kind in tables and kind not in self.plugins]
        plugins = describe_plugins(records, automatic, self.config.trainer, self.registry)
        return PluginLock(source, remedy, LockedPlugin.of_engine(), plugins, self.hash_code_files())

    def hash_code_files(self) -> dict[Path, str]:
        """Return the SHA-256 of the local files of code that this configuration uses, by their real paths."""
        selected = [*self.plugins.values(), *self.observers]
        own_schedule = NamedCode(dict.fromkeys(text for _, text in code_in(self.config.optimizer)))
        codes = [*(plugin.code for plugin in selected), own_schedule]
        return hash_code_files((plugin.loaded.record for plugin in selected), codes)

    def to_toml(self) -> str:
        """`as_dict()` as TOML that `load` reads back to the same configuration."""
        from skyrl_engine.config.report import to_toml

        return to_toml(self.as_dict())


def resolve(raw: RawConfig, *, need: Collection[str] | None = None, also: Collection[str] = ()) -> ResolvedConfig:
    """Check everything, select and load the plugins, structure their options; `need` and `also` as in `structure`.

    Raises ConfigError with every mistake found (those of plugin selection included) or, when all else is right, the plugin's own PluginError.
    """
    from skyrl_engine.registry.loader import load

    raw = with_preset(raw)
    gate = Gate.of(raw)
    structured = structure(raw, need, also)
    problems = list(structured.problems)
    plugin_errors: list[tuple[KeyPath, PluginError]] = []
    sections = structured.sections
    registry = _registry(sections.get("plugins", PluginsConfig()))
    chosen: list[_Chosen] = []
    automatic: list[str] = []
    for table in (*_plugin_tables(sections), *_observer_tables(sections)):
        if table.is_automatic:
            problems += _refuse_options_of_none(table, raw)
            automatic.append(table.kind)
            continue
        try:
            chosen.append(_Chosen(table, registry.resolve(table.kind, table.reference)))
        except PluginError as error:
            if table.kind == "loss" and isinstance(error, PluginNotFoundError) and (remedy := explain_preset(str(table.reference))):
                error = PluginNotFoundError(error.cause, remedy=remedy, details=error.details)
            plugin_errors.append((table.key, error))
    # before anything is imported
    gate.refuse_permission()
    gate.admit_tables(sections)
    gate.admit_plugins((selection.table.key, selection.record) for selection in chosen)
    if raw.lock is not None and not (problems or plugin_errors):
        records = {locked_place(format_key(selection.table.path), selection.record): selection.record for selection in chosen}
        raw.lock.refuse_other_plugins(describe_plugins(records, automatic, str(sections["trainer"]), registry))
    plugins: dict[str, SelectedPlugin] = {}
    observers: list[SelectedPlugin] = []
    options: list[tuple[KeyPath, type[Any], Mapping[str, Any]]] = []
    for selection in chosen:
        try:
            loaded = load(selection.record)
            selected, mistakes = _select(selection.table, loaded, raw, gate)
        except UntrustedCodeError:
            raise
        except PluginError as error:
            plugin_errors.append((selection.table.key, error))
            continue
        problems += mistakes
        if loaded.schema is not None:
            options.append((selection.table.path, loaded.schema, selection.table.options))
        if selected is not None and selection.table.kind == "observer":
            observers.append(selected)
        elif selected is not None:
            plugins[format_key(selection.table.path)] = selected
    problems += _find_secrets(raw)
    problems += _tables_of_no_observer(sections, raw)
    problems += _refuse_equal_names(chosen, raw)
    if problems or plugin_errors:
        problems += _find_absent(options, raw)
    _raise(problems, plugin_errors, raw)
    config = structured.config()
    origins = complete_origins(_as_dict(config, plugins, observers), raw, DEFAULT)
    resolved = ResolvedConfig(config, registry, plugins, tuple(observers), origins)
    if raw.lock is not None:
        raw.lock.refuse_other_files(resolved.hash_code_files())
    return resolved


@frozen
class _Choice:
    """A place of the configuration that selects a plugin: `key` names it there, `path` is the table of its options."""

    kind: str
    reference: str
    key: KeyPath
    path: KeyPath
    options: Mapping[str, Any]
    reserved: Sequence[str] = ("use",)
    coefficient: float | None = None
    on: Role | None = None
    on_error: OnError | None = None

    @property
    def is_automatic(self) -> bool:
        """True where the engine chooses the plugin as it plans the run."""
        return self.reference == AUTO and KINDS[self.kind].automatic is not None

    @classmethod
    def of_table(cls, path: KeyPath, kind: str, table: PluginTable) -> "_Choice":
        coefficient, on = getattr(table, "coef", None), getattr(table, "on", None)
        return cls(kind, table.use, (*path, "use"), path, table.options, own_keys(type(table)), coefficient, on)


@frozen
class _Chosen:
    """A choice, and the plugin that it means."""

    table: _Choice
    record: "PluginRecord"


def _refuse_options_of_none(table: _Choice, raw: RawConfig) -> Iterator[Problem]:
    """Yield the problems of options where no plugin is chosen that could have them."""
    for key in table.options:
        yield Problem(
            f"{nearest(raw.origins, (*table.path, key))}: {format_key((*table.path, key))}",
            f"is an option of a {table.kind}, and the engine chooses it: {format_key(table.key)} = {format_value(AUTO)}",
            f"Name the {table.kind} that has this option in {format_key(table.key)}, or remove the option",
        )


def _find_absent(options: Sequence[tuple[KeyPath, type[Any], Mapping[str, Any]]], raw: RawConfig) -> list[Problem]:
    """Return the problems of files that are not there, which whoever reads them would tell once nothing else is wrong.

    They are looked for in every table of the run, also where another key of it is wrong. `options` are those of plugins, each with the place of
    its table and its schema.
    """
    trainer = find_trainer(str(raw.table.get("trainer", DEFAULT_TRAINER)))
    tables = [
        ((name,), section.schema, raw.table[name])
        for name, section in list_sections(trainer).items()
        if name in raw.table
        and section.kind is None
        and attrs.has(section.schema)
        and (trainer is None or section.belongs_to(trainer))
    ]
    return [
        Problem(f"{nearest(raw.origins, key)}: {format_key(key)}", f"there is nothing at {place}", "Correct the path")
        for path, schema, table in (*tables, *options)
        for key, place in absent_places(schema, with_absolute_places(schema, table, path, raw.origins), path)
    ]


def _plugin_tables(sections: Mapping[str, Any]) -> Iterator[_Choice]:
    """Yield every table that selects a plugin."""
    for kind in TABLES:
        if isinstance(table := sections.get(kind), PluginTable):
            yield _Choice.of_table((kind,), kind, table)
            for key, listed in plugin_lists(type(table)).items():
                for index, entry in enumerate(getattr(table, key)):
                    if entry is not None:  # refused
                        yield _Choice.of_table((kind, key, index), listed.kind, entry)
    for key, listed in plugin_lists(EngineConfig).items():
        for index, entry in enumerate(sections.get(key, ())):
            if entry is not None:
                yield _Choice.of_table((key, index), listed.kind, entry)


def _observer_tables(sections: Mapping[str, Any]) -> Iterator[_Choice]:
    """Yield every observer, with the table of its options."""
    run, tables = sections.get("run"), sections.get("observers", {})
    if isinstance(run, RunConfig):
        for reference in run.observers:
            name = _table_name(reference, tables)
            own, table = take_own(tables.get(name, {})), tables.get(name, {})
            options = {key: value for key, value in table.items() if key not in own}
            path, reserved = ("observers", name), ("use", *attrs.fields_dict(ObserverTable))
            yield _Choice("observer", reference, ("run", "observers"), path, options, reserved, on_error=own.get("on_error"))


def _refuse_equal_names(chosen: Sequence["_Chosen"], raw: RawConfig) -> Iterator[Problem]:
    """Yield the problem of observers with one name, by which their tables and files are known."""
    observers: dict[str, list[str]] = {}
    for selection in chosen:
        if selection.table.kind == "observer":
            observers.setdefault(selection.record.name, []).append(selection.record.reference)
    for name, references in observers.items():
        if len(references) > 1:
            yield Problem(
                f"{nearest(raw.origins, ('run', 'observers'))}: run.observers",
                f"names {len(references)} observers called {name}: {' and '.join(references)}",
                "Keep one of them: their options and their files are known by this name",
            )


def _tables_of_no_observer(sections: Mapping[str, Any], raw: RawConfig) -> Iterator[Problem]:
    """Yield the problems of tables with options of observers that the run does not have."""
    run, tables = sections.get("run"), sections.get("observers", {})
    if not isinstance(run, RunConfig):
        return
    read = {_table_name(reference, tables) for reference in run.observers}
    for name in tables:
        if name not in read:
            remedy = did_you_mean(name, run.observers, show=format_value) or f"Add {name!r} to run.observers, or remove this table"
            where = f"{nearest(raw.origins, ('observers', name))}: {format_key(('observers', name))}"
            yield Problem(where, "holds options of an observer that run.observers does not name", remedy)


def _find_secrets(raw: RawConfig) -> Iterator[Problem]:
    """Find addresses with a password or a key in any table: configurations are printed, and runs write them into their files."""
    for path, value in leaves(raw.table):
        for text in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(text, str) or not is_address(text) or (shown := hide_secrets(text)) == text:
                continue
            where = f"{nearest(raw.origins, path)}: {format_key(path)}"
            yield Problem(where, f"the address {shown} holds a secret, which a run would write into its files", PLACE_OF_SECRETS)


def _registry(plugins: PluginsConfig) -> "Registry":
    from skyrl_engine.registry.resolve import Registry

    return Registry.discover(block=plugins.block, pin=plugins.pin)


def _select(table: _Choice, loaded: "LoadedPlugin", raw: RawConfig, gate: Gate) -> tuple[SelectedPlugin | None, list[Problem]]:
    options, problems = _options(loaded, table.options, table.path, raw, table.reserved)
    if problems:
        return None, problems
    code = gate.admit_options(table.path, options)
    return SelectedPlugin(loaded, options, _plain_options(options), table.coefficient, table.on, code, table.on_error), []


def _plain_options(options: object | None) -> dict[str, Any]:
    return {} if options is None else plain(options)


def _options(
    loaded: "LoadedPlugin", table: Mapping[str, Any], path: KeyPath, raw: RawConfig, reserved: Sequence[str] = ("use",)
) -> tuple[object | None, list[Problem]]:
    """Structure a plugin's options by its schema; problems name plugin, distribution and version."""
    plugin = str(loaded.record)
    own = (
        [] if loaded.schema is None else [name for field in attrs.fields(loaded.schema) for name in (field.name, field.alias or "")]
    )
    unable = [key for key in table if loaded.record.kind == "backend" and key in PARALLEL_SIZES and key not in own]
    refused = [
        Problem(
            f"{nearest(raw.origins, (*path, key))}: {format_key((*path, key))}",
            f"{plugin} does not declare the capability {key!r}",
            "Remove this key, or choose another backend",
        )
        for key in unable
    ]
    table = {key: value for key, value in table.items() if key not in unable}
    strays = {
        key: meant
        for key in table
        if find_near_word(key, own) is None and (meant := did_you_mean(key, reserved, show=format_value))
    }
    refused += [
        Problem(f"{nearest(raw.origins, (*path, key))}: {format_key((*path, key))}", f"is not a known key ({plugin})", meant)
        for key, meant in strays.items()
    ]
    table = {key: value for key, value in table.items() if key not in strays}
    left = {key: chosen for key in table if key not in own and (chosen := _find_other_choice(raw, path, key))}
    refused += [
        Problem(
            f"{nearest(raw.origins, (*path, key))}: {format_key((*path, key))}",
            f"is not a known key ({plugin})",
            " ".join(
                filter(
                    None,
                    (
                        did_you_mean(key, own, show=format_value),
                        f"Where it is of another {loaded.record.kind} than {chosen.label} chooses,",
                    ),
                )
            )
            + " remove it from the file",
        )
        for key, chosen in left.items()
    ]
    table = {key: value for key, value in table.items() if key not in left}
    if loaded.schema is None:
        return None, refused + [
            Problem(
                f"{nearest(raw.origins, (*path, key))}: {format_key((*path, key))}", f"{plugin} takes no options", "Remove this key"
            )
            for key in table
        ]
    for name in reserved:
        if name in attrs.fields_dict(loaded.schema):
            raise ContractError(
                f"{plugin} has an option named `{name}`, and {format_key(path)}.{name} is the engine's own key",
                remedy="Rename that option",
            )
    try:
        attrs.resolve_types(loaded.schema)
    except NameError as error:
        raise ContractError(
            f"the schema of {plugin} has annotations that cannot be read: {error}", remedy="Import the names they use"
        ) from error
    options, problems = structure_table(loaded.schema, table, path, raw)
    return options, refused + [attrs.evolve(problem, cause=f"{problem.cause} ({plugin})") for problem in problems]


def _find_other_choice(raw: RawConfig, path: KeyPath, key: str) -> Origin | None:
    """Return the origin of the choice of a plugin, where the command line makes it and a file gives the option `key`."""
    chosen = raw.origins.get(format_key((*path, "use")))
    origin = nearest(raw.origins, (*path, key))
    return chosen if chosen is not None and chosen.kind in ("option", "command line") and origin.kind == "file" else None


def _table_name(reference: str, tables: Mapping[str, Any]) -> str:
    """Return the key of an observer's options: its reference as written, or its bare name."""
    bare = reference.rpartition(":")[2]
    return reference if reference in tables or bare not in tables else bare


def _raise(problems: Sequence[Problem], errors: Sequence[tuple[KeyPath, PluginError]], raw: RawConfig) -> None:
    """Raise one error for all problems: the plugin's own when it is the only mistake, since it carries the exit code of plugins."""
    if problems:
        raise ConfigError([*problems, *_as_problems(errors, raw)])
    if len(errors) == 1:
        raise errors[0][1]
    if errors:
        details = [str(problem) for problem in _as_problems(errors, raw)]
        raise PluginError(f"{len(errors)} plugins cannot be used", remedy="Correct each line above", details=details)


def _as_problems(errors: Sequence[tuple[KeyPath, PluginError]], raw: RawConfig) -> Iterator[Problem]:
    for path, error in errors:
        yield Problem(f"{nearest(raw.origins, path)}: {format_key(path)}", error.cause, error.remedy)


def _as_dict(config: EngineConfig, plugins: Mapping[str, SelectedPlugin], observers: Sequence[SelectedPlugin]) -> dict[str, Any]:
    table: dict[str, Any] = plain(config)
    lists = {key: getattr(config, key) for key in plugin_lists(EngineConfig) if config.has(key)}
    for plugin in _plugin_tables({**config.selected, **lists}):
        place: Any = table
        *parents, last = plugin.path
        for part in parents:
            place = place[part]
        own = {key: value for key, value in place[last].items() if key in plugin.reserved}
        place[last] = own if plugin.is_automatic else {**own, **plugins[format_key(plugin.path)].table}
    table["observers"] = {
        _table_name(reference, config.observers): own | dict(observer.table)
        for reference, observer in zip(config.run.observers, observers, strict=True)
        if (own := {} if observer.on_error is None else {"on_error": observer.on_error}) or observer.table
    }
    return table
