"""`skyrl-engine plugins`: installed plugins, read from package metadata; only `show` and `verify` import one."""

from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.catalogue import install, make_index, search
from skyrl_engine.cli.command import EngineGroup, suggest_or_list
from skyrl_engine.cli.plugin_options import OPTION_COLUMNS, option_rows
from skyrl_engine.cli.scaffold.command import new_plugin
from skyrl_engine.cli.terminal import echo, echo_json
from skyrl_engine.cli.verify import verify

if TYPE_CHECKING:
    from skyrl_engine.registry.record import PluginRecord


@click.group(cls=EngineGroup)
def plugins() -> None:
    """List installed plugins, show one, verify one, write a new one; search a catalogue, install from it, make one."""


plugins.add_command(new_plugin)
plugins.add_command(verify)
plugins.add_command(search)
plugins.add_command(install)
plugins.add_command(make_index)


@plugins.command("list")
@click.option("--kind", metavar="KIND", help="Only plugins of this kind.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_plugins(kind: str | None, as_json: bool) -> None:
    """List every installed plugin with its distribution and version. Imports none of them."""
    from skyrl_engine.registry.resolve import Registry

    records = Registry.discover().records(None if kind is None else _require_kind(kind))
    if as_json:
        echo_json([_facts(record) for record in records])
        return
    from skyrl_engine.cli.render import show_table

    show_table(
        ("kind", "name", "distribution", "version", "for skyrl-engine"),
        [
            (record.kind, record.name, record.distribution or "", record.version or "", record.engine_requirement or "any")
            for record in records
        ],
    )


@plugins.command("show")
@click.argument("plugin", metavar="KIND:REFERENCE")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def show_plugin(plugin: str, as_json: bool) -> None:
    """Show where a plugin comes from and which options it takes.

    PLUGIN is, for instance, `loss:cross_entropy`, `skyrl-engine-losses:cross_entropy` or `loss:./my_loss.py:my_loss`.
    """
    from pathlib import Path

    from skyrl_engine.cli.verify import find_record
    from skyrl_engine.registry.loader import load
    from skyrl_engine.registry.resolve import Registry

    kind, colon, reference = plugin.partition(":")
    if not colon or not reference:
        raise click.UsageError(f"{plugin!r} is not of the form KIND:REFERENCE, such as loss:cross_entropy.")
    registry = Registry.discover()
    if any(record.distribution == kind for record in registry.records()):
        loaded = load(find_record(registry, plugin))
    else:
        loaded = load(registry.resolve(_require_kind(kind), reference, base=Path.cwd()))
    facts = _facts(loaded.record)
    options = option_rows(loaded)
    if as_json:
        echo_json({**facts, "options": options})
        return
    from skyrl_engine.cli.render import show_facts, show_table

    show_facts({name: value for name, value in facts.items() if value is not None})
    echo()
    if options:
        show_table(OPTION_COLUMNS, [tuple(option.values()) for option in options])
    else:
        echo("It takes no options.")


def _require_kind(kind: str) -> str:
    from skyrl_engine.registry.kinds import KINDS

    if kind not in KINDS:
        raise click.UsageError(f"There is no kind {kind!r}. {suggest_or_list(kind, KINDS, 'kinds')}")
    return kind


def _facts(record: "PluginRecord") -> dict[str, Any]:
    return {
        "kind": record.kind,
        "name": record.name,
        "reference": record.reference,
        "distribution": record.distribution,
        "version": record.version,
        "source": record.source,
        "target": record.target,
        "engine_requirement": str(record.engine_requirement) if record.engine_requirement is not None else None,
        "path": str(record.path) if record.path is not None else None,
        "sha256": record.sha256,
    }
