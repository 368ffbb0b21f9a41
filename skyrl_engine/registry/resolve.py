"""Resolve a reference to exactly one plugin, from metadata and file content alone, without importing anything.

The rules, in their order: blocked plugins are dropped; a name must match exactly; one claim wins; of several claims the pinned one wins,
otherwise it is an error that names them in full. No distribution has priority, the engine's own included.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from attrs import frozen

from skyrl_engine.errors import PluginAmbiguousError, PluginBlockedError, PluginBrokenError
from skyrl_engine.registry.discovery import UnreadableDistribution, discover
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.known import install_command
from skyrl_engine.registry.plugin_ref import PluginRef, parse
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.selection import Selection
from skyrl_engine.registry.suggest import missing_file, missing_plugin

__all__ = ["PluginRecord", "Registry"]


@frozen
class Registry:
    """The plugins that are installed here, and the configuration's selection among them."""

    _records: tuple[PluginRecord, ...]
    unreadable: tuple[UnreadableDistribution, ...]
    selection: Selection

    @classmethod
    def discover(cls, *, block: Sequence[str] = (), pin: Mapping[str, str] = MappingProxyType({})) -> "Registry":
        """Read the metadata of what is installed. Raises ConfigError for a pin that is not "kind:name"."""
        discovery = discover()
        return cls(discovery.records, discovery.unreadable, Selection.of(block, pin))

    def records(self, kind: str | None = None) -> tuple[PluginRecord, ...]:
        """Return every plugin that is installed and not blocked, of one kind or of all."""
        usable = (record for record in self._records if self.selection.blocks(record) is None)
        return tuple(record for record in usable if kind in (None, record.kind))

    def resolve(self, kind: str, reference: str, *, base: Path | None = None) -> PluginRecord:
        """Return the one plugin that `reference` means; a relative file is looked up from `base` (None: the working directory).

        Raises PluginNotFoundError, PluginAmbiguousError, PluginBlockedError, or PluginBrokenError for a file that cannot be read and a
        distribution that offers one name twice.
        """
        assert kind in KINDS, f"there is no kind {kind!r}"
        wanted = parse(reference, base=base)
        if wanted.path is not None:
            return self._refuse_blocked(_of_file(kind, wanted, wanted.path))
        pinned = None if wanted.distribution else self.selection.pins.get((kind, wanted.name))
        distribution = wanted.distribution or pinned
        claims = [record for record in self._records if (record.kind, record.name) == (kind, wanted.name)]
        matches = [record for record in claims if distribution in (None, record.distribution)]
        usable = [record for record in matches if self.selection.blocks(record) is None]
        if len(usable) == 1:
            return usable[0]
        if usable:
            raise _ambiguity_error(usable)
        if matches:
            return self._refuse_blocked(matches[0])
        raise missing_plugin(kind, wanted, self.records(), self.unreadable, pinned=pinned)

    def _refuse_blocked(self, record: PluginRecord) -> PluginRecord:
        entry = self.selection.blocks(record)
        if entry is not None:
            raise PluginBlockedError(
                f"{record} is blocked by {entry!r} in plugins.block", remedy=f"Choose another {record.kind}, or remove that entry"
            )
        return record


def _ambiguity_error(claims: Sequence[PluginRecord]) -> PluginAmbiguousError | PluginBrokenError:
    first = claims[0]
    distributions = list(dict.fromkeys(record.distribution for record in claims))
    if len(distributions) < len(claims):
        twice = next(record for record in claims if sum(other.distribution == record.distribution for other in claims) > 1)
        return PluginBrokenError(
            f"{twice.origin} offers the {first.kind} {first.name!r} more than once, with different targets",
            remedy=f"Upgrade it: {install_command('--upgrade', str(twice.distribution))}",
            details=[
                f"{record.kind} {record.name} = {record.target}"
                + (f" ({record.origin})" if record.distribution != twice.distribution else "")
                for record in claims
            ],
        )
    return PluginAmbiguousError(
        f"the {first.kind} {first.name!r} is claimed by {len(claims)} distributions: {join_in_words([record.reference for record in claims])}",
        remedy=f"Write {join_in_words([record.reference for record in claims], 'or')}, or pin one of them: plugins.pin = "
        f'{{ "{first.kind}:{first.name}" = "{first.distribution}" }}',
        details=[str(record) for record in claims],
    )


def join_in_words(names: Sequence[str], joint: str = "and") -> str:
    """Return all names in words: "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} {joint} {last}" if others else last


def _of_file(kind: str, wanted: PluginRef, path: Path) -> PluginRecord:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise missing_file(kind, wanted, path) from None
    except OSError as error:
        raise PluginBrokenError(
            f"the local {kind} {wanted.text!r} cannot be read from {path}: {error.strerror}", remedy="Make the file readable"
        ) from error
    try:
        return PluginRecord.of_file(kind, path, wanted.name, content)
    except UnicodeDecodeError as error:
        raise PluginBrokenError(
            f"the local {kind} {wanted.text!r} in {path} is not UTF-8: {error.reason} at byte {error.start}",
            remedy="Save the file as UTF-8",
        ) from error
