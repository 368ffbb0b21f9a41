"""Hold a configuration to a lock of its plugins, and make the lock of one."""

from collections.abc import Iterable, Mapping

from skyrl_engine.config.find_trainer import find_trainer_record
from skyrl_engine.config.reading.origins import format_key
from skyrl_engine.registry.kinds import AUTO, KINDS
from skyrl_engine.registry.plugin_lock import LockedPlugin
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.resolve import Registry

TRAINER = "trainer"
"""Place of a trainer of another distribution among the plugins of a lock, of run.json and of a checkpoint."""


def locked_place(place: str, record: PluginRecord) -> str:
    """Return the place of a plugin in a lock: observers are known by their names, every other plugin by its table."""
    return locked_observer(record.name) if record.kind == "observer" else place


def locked_observer(name: str) -> str:
    """Return the place of an observer in a lock."""
    return format_key(("observers", name))


def describe_plugins(
    records: Mapping[str, PluginRecord], automatic: Iterable[str], trainer: str, registry: Registry
) -> dict[str, LockedPlugin]:
    """Return what a lock says of the plugins of a configuration; nothing is imported.

    `records` are those that are chosen, by their tables; `automatic` are the kinds that the engine chooses while it plans, of which the
    distribution is known before.
    """
    plugins = {locked_place(place, record): LockedPlugin.of_record(record) for place, record in records.items()}
    for kind in automatic:
        offered = [record for record in registry.records(kind) if record.distribution == KINDS[kind].automatic]
        if offered:
            plugins[kind] = LockedPlugin.of_record(offered[0], AUTO)
    record = find_trainer_record(trainer)
    return plugins if record is None else {**plugins, TRAINER: LockedPlugin.of_record(record)}
