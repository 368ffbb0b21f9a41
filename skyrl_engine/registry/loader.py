"""The only place that loads entry points and imports plugin modules. Metadata is checked before anything is imported."""

import inspect
from importlib import metadata
from typing import Any, cast

import attrs

from skyrl_engine.errors import ContractError, PluginBrokenError, PluginNotFoundError
from skyrl_engine.hooks import decorators
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.compat import check_requirements, find_distribution
from skyrl_engine.registry.discovery import COMMAND_GROUP, TRAINER_GROUP
from skyrl_engine.registry.host import PluginHost
from skyrl_engine.registry.installed import remember_while_unchanged
from skyrl_engine.registry.kinds import CONFIG_SCHEMA_HOOK, KINDS
from skyrl_engine.registry.known import install_command
from skyrl_engine.registry.loaded import LoadedPlugin
from skyrl_engine.registry.local_module import local_module
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.registry.record import PluginRecord

__all__ = ["LoadedPlugin", "load"]


def load(record: PluginRecord) -> LoadedPlugin:
    """Verify, import and register the plugin of a record.

    Raises PluginNotFoundError when it is not installed here, PluginIncompatibleError when the version installed here is another than the
    record's, or metadata excludes this engine or this environment, PluginBrokenError when importing or registering fails, and
    ContractError when its schema is no attrs class.
    """
    return load_object(record, _import_plugin(record))


def load_object(record: PluginRecord, plugin: object) -> LoadedPlugin:
    """Register a plugin that was imported already, and that the record describes. Raises as `load` does after the import."""
    host = PluginHost()
    hooks = host.register(plugin, Owner.of(record))
    for hook in KINDS[record.kind].hooks:
        if hook not in hooks:
            raise _missing_hook_error(record, plugin, hooks, hook)
    return LoadedPlugin(record, _schema(record, host), plugin, host)


def load_command(record: PluginRecord) -> object:
    """Import what the entry point of a command names. Raises PluginIncompatibleError, or PluginBrokenError where it fails."""
    check_requirements(record, metadata.distribution(str(record.distribution)))
    return _import_entry_point(record, COMMAND_GROUP, Owner(str(record), "Uninstall it"))


def load_trainer(record: PluginRecord) -> object:
    """Import what the entry point of a trainer names. Raises PluginIncompatibleError, or PluginBrokenError where it fails."""
    check_requirements(record, metadata.distribution(str(record.distribution)))
    return _import_entry_point(record, TRAINER_GROUP, Owner(str(record), "Choose another trainer"))


def list_implemented_kinds(record: PluginRecord) -> list[str]:
    """The kinds whose factory hooks the plugin of a record implements, whatever kind the record names. Raises as `load` does."""
    hooks = PluginHost().register(_import_plugin(record), Owner.of(record))
    return [kind.name for kind in KINDS.values() if kind.factory_hook in hooks]


def _import_plugin(record: PluginRecord) -> object:
    owner = Owner.of(record)
    return _from_file(record, owner) if record.source == "file" else _from_distribution(record, owner)


def _from_distribution(record: PluginRecord, owner: Owner) -> Any:
    _require_usable(record)
    return _import_entry_point(record, KINDS[record.kind].group, owner)


@remember_while_unchanged
def _require_usable(record: PluginRecord) -> None:
    """Refuse a plugin that is not installed as its record says, or not made for this engine or what is installed beside it."""
    check_requirements(record, find_distribution(record))


def _import_entry_point(record: PluginRecord, group: str, owner: Owner) -> Any:
    point = metadata.EntryPoint(record.name, record.target, group)
    with blame(attrs.evolve(owner, remedy=f"Upgrade it: {install_command('--upgrade', str(record.distribution))}"), "its import"):
        return point.load()


def _from_file(record: PluginRecord, owner: Owner) -> Any:
    with blame(owner, "its import"):
        assert record.path is not None, f"{record} is of no file"
        assert record.source_text is not None, f"{record} is recorded without its content"
        module = local_module(record.path, record.source_text.encode())
    try:
        return getattr(module, record.target)
    except AttributeError:
        defined = [name for name in vars(module) if not name.startswith("_")]
        raise PluginNotFoundError(
            f"{record.path} defines no {record.target!r}",
            remedy=did_you_mean(record.target, defined, show=lambda near: f"{record.path}:{near}")
            or "Write the name that the file defines after the colon",
        ) from None


def _missing_hook_error(record: PluginRecord, plugin: object, hooks: frozenset[str], hook: str) -> PluginBrokenError:
    kinds = [name.removeprefix("skyrl_engine_make_") for name in sorted(hooks) if name.startswith("skyrl_engine_make_")]
    if kinds and record.kind not in kinds:
        remedy = f"Set it as {kinds[0]}"
    elif not hooks and record.kind == "environment" and inspect.isfunction(plugin):
        place = f"{record.path or 'FILE.py'}:{record.target}"
        remedy = (
            f"A reward function is given as --reward {place} --data TASKS, and tried with `env try function reward={place} data=TASKS`; an "
            "environment has that method, marked with skyrl_engine.hookimpl"
        )
    elif not kinds and hasattr(decorators, record.kind):
        remedy = f"Mark a method of that name with skyrl_engine.hookimpl, or a function with skyrl_engine.{record.kind}"
    else:
        remedy = "Mark a method of that name with skyrl_engine.hookimpl"
    return PluginBrokenError(f"{record} does not implement {hook}", remedy=remedy)


def _schema(record: PluginRecord, host: PluginHost) -> type[Any] | None:
    schema: Any = host.hook.skyrl_engine_config_schema()
    if schema is not None and not (isinstance(schema, type) and attrs.has(schema)):
        raise ContractError(
            f"{CONFIG_SCHEMA_HOOK} of {record} returned {schema!r}",
            remedy="Return an attrs class, or None where there are no options",
        )
    return cast("type[Any] | None", schema)
