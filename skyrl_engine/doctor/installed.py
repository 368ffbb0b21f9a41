"""The engine, its plugins, commands and trainers as they are installed: ranges, requirements, stale and doubled ones."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from skyrl_engine.doctor.finding import DoctorFinding
from skyrl_engine.errors import EngineError
from skyrl_engine.registry.compat import list_unmet
from skyrl_engine.registry.discovery import ENGINE, discover, discover_commands, discover_trainers, normalise
from skyrl_engine.registry.known import install_command
from skyrl_engine.registry.loader import load, load_command, load_trainer
from skyrl_engine.registry.record import PluginRecord


def examine_plugins() -> Iterator[DoctorFinding]:
    """Import every plugin, command and trainer, and yield what is wrong with one, or how many there are."""
    discovery = discover()
    for unreadable in discovery.unreadable:
        yield DoctorFinding("plugins", "problem", str(unreadable), "Reinstall it, or delete its folder")
    loaders: list[tuple[tuple[PluginRecord, ...], Callable[[PluginRecord], object]]] = [
        (discovery.records, load),
        (discover_commands(), load_command),
        (discover_trainers(), load_trainer),
    ]
    counts: dict[str, int] = defaultdict(int)
    for records, load_record in loaders:
        for record in records:
            try:
                load_record(record)
            except EngineError as error:
                yield DoctorFinding(f"{record.kind} {record.name}", "problem", error.args[0], error.remedy)
            else:
                counts[str(record.distribution)] += 1
    whole = sum(counts.values())
    yield DoctorFinding(
        "plugins", "ok", f"{whole} of {len(counts)} distributions are imported and fit engine {metadata.version(ENGINE)}"
    )
    yield from _find_shared_names(discovery.records)


def _find_shared_names(records: tuple[PluginRecord, ...]) -> Iterator[DoctorFinding]:
    """Yield names that several distributions offer for one kind."""
    claims: dict[tuple[str, str], list[PluginRecord]] = defaultdict(list)
    for record in records:
        claims[record.kind, record.name].append(record)
    for (kind, name), offered in claims.items():
        if len(offered) > 1:
            remedy = f'Name it whole in configurations, such as "{offered[0].reference}", or uninstall one'
            owners = " and ".join(str(record.distribution) for record in offered)
            yield DoctorFinding(f"{kind} {name}", "warning", f"{owners} both offer it", remedy)


def examine_distributions() -> Iterator[DoctorFinding]:
    """Yield distributions of the engine that are installed twice or lack what they require."""
    places: dict[str, list[metadata.Distribution]] = defaultdict(list)
    for distribution in metadata.distributions():
        name = normalise(distribution.metadata["Name"] or "")
        if name == ENGINE or "skyrl_engine." in (distribution.read_text("entry_points.txt") or ""):
            places[name].append(distribution)
    whole = 0
    for name, installed in sorted(places.items()):
        folders = list(dict.fromkeys(str(Path(str(distribution.locate_file(""))).resolve()) for distribution in installed))
        if len(installed) > 1:
            versions = ", ".join(str(distribution.version) for distribution in installed)
            where = " and ".join(folders)
            remedy = f"Run `pip uninstall {name}` until it is gone, then {install_command(name)}"
            yield DoctorFinding(
                name,
                "warning",
                f"it is installed {len(installed)} times (versions {versions}) in {where}; Python imports the first",
                remedy,
            )
        unmet = list_unmet(installed[0])
        if unmet:
            yield DoctorFinding(
                name, "problem", f"it needs {' and '.join(unmet)}", install_command(f"{name}=={installed[0].version}")
            )
        whole += not unmet
    yield DoctorFinding("distributions", "ok", f"{whole} of the engine have what they require")
