"""Make errors for references that name no plugin here, with the likely meaning and the one action that helps."""

from collections.abc import Sequence
from pathlib import Path

from skyrl_engine.errors import PluginNotFoundError
from skyrl_engine.near_words import did_you_mean, find_near_word
from skyrl_engine.registry.discovery import UnreadableDistribution
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.known import install_command, list_first_party, read_first_party
from skyrl_engine.registry.plugin_ref import PluginRef
from skyrl_engine.registry.record import PluginRecord


def missing_plugin(
    kind: str,
    wanted: PluginRef,
    records: Sequence[PluginRecord],
    unreadable: Sequence[UnreadableDistribution],
    *,
    pinned: str | None,
) -> PluginNotFoundError:
    """Return the error for a reference that no usable plugin has; `pinned` is the distribution that a pin names."""
    details = [str(distribution) for distribution in unreadable]
    distribution = wanted.distribution or pinned
    if distribution is None:
        cause = f"there is no {kind} {wanted.name!r}"
        remedy = _bare_name(kind, wanted.name, records)
    else:
        versions = {record.distribution: record.version for record in records}
        says = f"{wanted.text!r}" if pinned is None else f"{wanted.text!r}, pinned to {pinned},"
        if distribution in versions:
            cause = f"the {kind} {says} is not offered by {distribution} {versions[distribution]}"
        else:
            cause = f"the {kind} {says} cannot be found: no plugin of a distribution {distribution} is installed"
        remedy = _suggest_install(kind, wanted.name, distribution, records)
        if pinned is not None and any(record.kind == kind and record.name == wanted.name for record in records):
            remedy = f'Correct or remove "{kind}:{wanted.name}" in plugins.pin'
    return PluginNotFoundError(cause, remedy=remedy, details=details)


def missing_file(kind: str, wanted: PluginRef, path: Path) -> PluginNotFoundError:
    """Return the error for a local plugin whose file does not exist."""
    if path.is_dir():
        return PluginNotFoundError(
            f"the local {kind} {wanted.text!r} cannot be found: {path} is a folder",
            remedy=f"Name the file in it that defines the plugin: {path}/FILE.py:{wanted.name}",
        )
    siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
    remedy = did_you_mean(path.name, siblings, show=lambda near: f"{path.parent / near}:{wanted.name}") or "Correct the path"
    return PluginNotFoundError(f"the local {kind} {wanted.text!r} cannot be found: there is no file {path}", remedy=remedy)


def _bare_name(kind: str, name: str, records: Sequence[PluginRecord]) -> str:
    if command := _first_party_command(kind, name, records):
        return f"Install it: {command}"
    others = [record for record in records if record.name == name]
    if others:
        return f"{name!r} is {KINDS[others[0].kind].with_article}: set it as {others[0].kind}, and choose {_choice(kind, records)} here"
    installed = list(dict.fromkeys(record.name for record in records if record.kind == kind))
    near = find_near_word(name, [*installed, *list_first_party(kind)])
    if near is None:
        return f"Choose {_choice(kind, records)}"
    command = _first_party_command(kind, near, records)
    return f"Did you mean {near!r}?" + (f" Install it: {command}" if command else "")


def _suggest_install(kind: str, name: str, distribution: str, records: Sequence[PluginRecord]) -> str:
    if read_first_party().get((kind, name)) == distribution and (command := _first_party_command(kind, name, records)):
        return f"Install it: {command}"
    references = [record.reference for record in records if record.kind == kind]
    same_distribution = [reference for reference in references if reference.startswith(f"{distribution}:")]
    same_name = [record.reference for record in records if record.kind == kind and record.name == name]
    written = f"{distribution}:{name}"
    near = (
        find_near_word(written, same_distribution)
        or next(iter(same_name), None)
        or find_near_word(written, references, cutoff=0.75)
    )
    if near:
        return f"Did you mean {near!r}?"
    if distribution in {record.distribution for record in records}:
        return f"Choose {_choice(kind, records)}"
    return f"Install the distribution {distribution}, or choose {_choice(kind, records)}"


def _first_party_command(kind: str, name: str, records: Sequence[PluginRecord]) -> str | None:
    """Return the pip command for a first-party plugin that is not installed.

    Other names get none: a command made from typed text would install whatever distribution bears the misspelt name.
    """
    distribution = read_first_party().get((kind, name))
    if distribution is None or any(record.kind == kind and record.name == name for record in records):
        return None
    return install_command(distribution)


def _choice(kind: str, records: Sequence[PluginRecord]) -> str:
    names = list(dict.fromkeys(record.name for record in records if record.kind == kind))
    if not names:
        return f"{KINDS[kind].with_article} once a distribution that offers one is installed"
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
