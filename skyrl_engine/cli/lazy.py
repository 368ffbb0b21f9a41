"""A group that knows its commands by name and one line of help, and imports a command's module when it is used.

The program's own group also has the commands that other distributions add (`cli/extension_commands.py`).
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from attrs import frozen

from skyrl_engine.cli.command import EngineGroup
from skyrl_engine.cli.extension_commands import ExtensionCommands


@frozen
class LazyCommand:
    """A command that is not imported yet: its home ("package.module:name"), and its line in the `--help` of the group above it."""

    target: str
    short_help: str

    def load(self) -> click.Command:
        module, _, name = self.target.partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command), f"{self.target} is no command"
        return command


class LazyGroup(EngineGroup):
    """A group whose help is written from its table and from metadata alone. What it does not know itself it asks other distributions for."""

    def __init__(
        self, *arguments: Any, table: Mapping[str, LazyCommand], aliases: Mapping[str, str] | None = None, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.table = table
        self.aliases = aliases or {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [*self.table, *ExtensionCommands.discover(self.table).names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        name = self.aliases.get(cmd_name, cmd_name)
        return self.table[name].load() if name in self.table else ExtensionCommands.discover(self.table).load(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.short_help) for name, command in self.table.items()])
        if rows := ExtensionCommands.discover(self.table).rows():
            with formatter.section("Commands of other distributions"):
                formatter.write_dl(rows)
