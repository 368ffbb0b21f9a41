"""Commands that other distributions add to `skyrl-engine`, by entry points of the group `skyrl_engine.command`.

Found in metadata, as plugins are, and imported when one is called. A distribution adds `acme.cli:serve`, a click command, like this:

    [project.entry-points."skyrl_engine.command"]
    serve = "acme.cli:serve"

It is called by its name, or in full as `acme-server:serve`. The engine's own commands cannot be replaced.
"""

from collections.abc import Collection
from typing import Self

import click
from attrs import frozen

from skyrl_engine.cli.command import common_options
from skyrl_engine.errors import PluginAmbiguousError, PluginBrokenError
from skyrl_engine.registry.record import PluginRecord


@frozen
class ExtensionCommands:
    """The commands of other distributions, `records`; `taken` are names of the engine's own."""

    records: tuple[PluginRecord, ...]
    taken: frozenset[str]

    @classmethod
    def discover(cls, taken: Collection[str]) -> Self:
        """Read metadata; imports nothing of any distribution."""
        from skyrl_engine.registry.discovery import discover_commands

        return cls(discover_commands(), frozenset(taken))

    @property
    def names(self) -> list[str]:
        """Return the names that mean one command: bare where one distribution offers it, in full where several do."""
        return [self._display_name(record) for record in self.records if record.name not in self.taken]

    def rows(self) -> list[tuple[str, str]]:
        """Return name and one line of help for every command, also for those whose name is taken."""
        from skyrl_engine.registry.discovery import summary_of

        return [
            (record.reference, "Cannot be used: the engine has a command of this name.")
            if record.name in self.taken
            else (self._display_name(record), f"{summary_of(record) or 'No summary'} ({record.distribution})")
            for record in self.records
        ]

    def load(self, name: str) -> click.Command | None:
        """Import the command of this name; None where there is none.

        Raises PluginAmbiguousError where several distributions offer it, PluginIncompatibleError for one that is made for another engine,
        and PluginBrokenError for one that is called like the engine's own, fails to import, or is no click command.
        """
        matches = [record for record in self.records if name in (record.name, record.reference)]
        if not matches:
            return None
        first = matches[0]
        if len(matches) > 1:
            raise PluginAmbiguousError(
                f"the command {name!r} is offered by {len(matches)} distributions",
                remedy=f"Write {' or '.join(record.reference for record in matches)}",
                details=[str(record) for record in matches],
            )
        if first.name in self.taken:
            raise PluginBrokenError(
                f"{first} is called like a command of the engine", remedy="Ask its author for another name, or uninstall it"
            )
        from skyrl_engine.registry.loader import load_command

        command = load_command(first)
        if not isinstance(command, click.Command):
            raise PluginBrokenError(
                f"{first} is a {type(command).__name__} and no click command", remedy="Let its entry point name a click command"
            )
        known = {parameter.name for parameter in command.params}
        command.params += [option for option in common_options() if option.name not in known]
        return command

    def _display_name(self, record: PluginRecord) -> str:
        several = sum(other.name == record.name for other in self.records) > 1
        return record.reference if several else record.name
