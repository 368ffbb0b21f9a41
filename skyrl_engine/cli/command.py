"""Parts of every command: `--debug`, `--quiet`, and groups that answer a misspelt command with the nearest one."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from attrs import define

from skyrl_engine.cli.option_help import explain
from skyrl_engine.cli.read_keys import ReadKeys
from skyrl_engine.cli.terminal import echo, make_log_visible
from skyrl_engine.errors import EngineError, named_by
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.visible import visible


@define
class CommandSettings:
    """The settings that every command has. `log` is the file that tells more about a failure, once there is one.

    `mapped` is the table of the configuration that `--map` fills, None where the command line gives it none to fill. `owns_process` says that
    the command is all that its process does; `tell_log` tells the process above of `log`, where there is one.
    """

    debug: bool = False
    quiet: bool = False
    log: Path | None = None
    mapped: str | None = "data.map"
    owns_process: bool = False
    tell_log: Callable[[Path], object] | None = None


def settings_of(context: click.Context) -> CommandSettings:
    return context.ensure_object(CommandSettings)


def current_settings() -> CommandSettings:
    """Return the settings of the command that is running."""
    return settings_of(click.get_current_context())


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    assert parameter.name is not None
    if value:
        setattr(settings_of(context), parameter.name, True)


def common_options() -> list[click.Parameter]:
    """Return `--debug` and `--quiet`, which may stand before or after the command's name."""
    return [
        click.Option(
            ["--debug"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_remember,
            help="Show the traceback of a failure.",
        ),
        click.Option(
            ["--quiet"], is_flag=True, expose_value=False, is_eager=True, callback=_remember, help="Print results and errors only."
        ),
    ]


class EngineCommand(click.Command):
    """A command whose options say their defaults: those of the keys in `keys`, as `trainer` has them with its `preset`.

    Of key=value it takes those that `reads` has (None: all that a run takes), and of those the ones of its trainer: `trainers` are the trainers
    whose keys a hint may name where there are several, none where a configuration file says which.
    """

    def __init__(
        self,
        *arguments: Any,
        keys: Mapping[str, str] | None = None,
        trainer: str | None = None,
        preset: str | None = None,
        reads: ReadKeys | None = None,
        trainers: Collection[str] = (),
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.params = [*self.params, *common_options()]
        self._keys, self._trainer, self._preset, self._explained = keys or {}, trainer, preset, False
        self._reads, self._trainers = reads, trainers

    def explain_options(self) -> "EngineCommand":
        """Return the command itself, whose options say defaults and examples from now on; the schema is read for help alone."""
        if not self._explained:
            self._explained = True
            for option in self.params:
                if isinstance(option, click.Option):
                    name = option.name or ""
                    key = self._keys.get(name) or (f"{name}.use" if name in KINDS and KINDS[name].option else None)
                    explain(option, self.name or "", key, self._trainer, self._preset)
        return self

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write help, with defaults and examples."""
        self.explain_options()
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; an option that is none is answered with the option or the key of that meaning, a file with its command."""
        texts = tuple(args)
        try:
            remaining = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (
                hint := self._name_argument(error.option_name, ctx) or self.find_meant_option(error.option_name, texts)
            ) is not None:
                raise click.UsageError(f"There is no option {error.option_name}. {hint}", ctx) from error
            raise
        except click.MissingParameter as error:
            if (file := next(filter(_is_configuration, texts), None)) is not None:
                hint = f"{file} is a configuration, and {ctx.info_name} makes its own: write `skyrl-engine run {file}`."
                raise click.UsageError(hint, ctx) from error
            raise
        _refuse_no_number(ctx)
        return remaining

    def _name_argument(self, option: str, ctx: click.Context) -> str | None:
        """Say how an argument of the command is written whose name an option has, or the beginning of it; None where none has."""
        word = option.lstrip("-").replace("-", "_")
        arguments = [param for param in self.params if isinstance(param, click.Argument)]
        meant = next((each for each in arguments if len(word) > 2 and (each.name or "").startswith(word)), None)
        if meant is None:
            return None
        written = " ".join(each.make_metavar(ctx) for each in arguments if each.name != "overrides")
        return f"{meant.make_metavar(ctx)} is written without one: `{ctx.command_path} {written}`."

    def find_meant_option(self, option: str, words: Sequence[str] = ()) -> str | None:
        """Say which option of the command, or which key=value that it takes, has the meaning of a word that is no option; None without one.

        `words` are those of the command line: a configuration file among them says whose keys it takes.
        """
        from skyrl_engine.config.find_trainer import get_trainer
        from skyrl_engine.config.foreign_keys import explain_word, key_for, remark_of
        from skyrl_engine.config.structure import home_of, is_switch

        word, trainers = option.lstrip("-").replace("-", "_"), self._list_trainers(words)
        trainer = next(iter(trainers)) if len(trainers) == 1 else None
        for key in (key_for(word, trainer), home_of(word, None if trainer is None else get_trainer(trainer))):
            if key is not None and (hint := self._name_option(key, remark_of(word, trainer))) is not None:
                return hint
            if key is not None and self._takes(key, trainers):
                sentence = explain_word(word, trainer) or f"Set {key}"
                return sentence if "[[" in sentence else f"{sentence}: write {key}={'true' if is_switch(key) else 'VALUE'}"
        return explain_word(word, trainer) if self._trains and key_for(word, trainer) is None else None

    def _name_option(self, key: str, remark: str) -> str | None:
        """Ask for the option of the command that sets a key; None where it has none."""
        from skyrl_engine.config.reading.sources import option_name

        own = next((f"--{name.replace('_', '-')}" for name, of_option in self._keys.items() if of_option == key), None)
        name = own or {"run.directory": "--output", "data.eval": "--eval-data"}.get(key) or option_name(key)
        if not any(name in param.opts for param in self.params):
            return None
        return f"Did you mean {name}{f' ({remark})' if remark else ''}?"

    @property
    def _trains(self) -> bool:
        """True where the command takes all keys of a run."""
        return self._reads is None and any(param.name == "overrides" for param in self.params)

    def _takes(self, key: str, trainers: Collection[str]) -> bool:
        """Say whether key=value of the command may set a key, in runs of any of these trainers."""
        from skyrl_engine.config.find_trainer import get_trainer
        from skyrl_engine.config.sections import sections

        section = sections().get(key.partition(".")[0])
        if not (self._trains or (self._reads is not None and self._reads.has(key))) or section is None:
            return False
        return all(section.belongs_to(get_trainer(trainer)) for trainer in trainers)

    def _list_trainers(self, words: Sequence[str]) -> Collection[str]:
        """Return the trainers of the command's run: its own, or the one that a configuration file or a key=value names."""
        from skyrl_engine.config.find_trainer import list_trainer_names
        from skyrl_engine.config.reading.sources import read_file
        from skyrl_engine.config.trainers import DEFAULT_TRAINER
        from skyrl_engine.errors import ConfigError

        if self._trainers or self._trainer:
            return self._trainers or (str(self._trainer),)
        named = next((word.partition("=")[2] for word in words if word.startswith("trainer=")), None)
        if named is None and (file := next(filter(_is_configuration, words), None)) is not None:
            try:
                named = read_file(Path(file))[0].get("trainer")
            except ConfigError:
                named = None
        return (str(named),) if named in list_trainer_names() else (DEFAULT_TRAINER,)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it logs where no log is kept reaches the terminal without control characters.

        An error that names a column by its key names `--map` where that is what fills its table.
        """
        make_log_visible()
        try:
            return super().invoke(ctx)
        except EngineError as error:
            mapped = settings_of(ctx).mapped
            if mapped is not None and any("--map" in param.opts for param in self.params):
                error.cause, error.remedy = (named_by(text, mapped, "--map ") for text in (error.cause, error.remedy))
                error.details = tuple(named_by(text, mapped, "--map ") for text in error.details)
            raise


def _refuse_no_number(context: click.Context) -> None:
    """Raise BadParameter for an option whose number is NaN or infinite: nothing compares with the one, everything with the other."""
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if isinstance(value, float) and not math.isfinite(value):
            raise click.BadParameter(f"{value} is not a finite number.", context, parameter)


def _is_configuration(word: str) -> bool:
    return Path(word).suffix in (".toml", ".yaml", ".yml") and Path(word).is_file()


class EngineGroup(click.Group):
    command_class = EngineCommand

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.params = [*self.params, *common_options()]

    def get_help(self, ctx: click.Context) -> str:
        """Return help as click does; it names what other distributions say of themselves."""
        return visible(super().get_help(ctx))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; without a command, print help on stderr and end with the exit code of a wrong command line."""
        if not args and not ctx.resilient_parsing:
            echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, with a suggestion for a misspelt name."""
        names = self.list_commands(ctx)
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"There is no command {args[0]!r}. {suggest_or_list(args[0], names, 'commands')}")
        return super().resolve_command(ctx, args)


def suggest_or_list(name: str, names: Collection[str], plural: str) -> str:
    """Return the nearest name as a question, or all names as a sentence."""
    return did_you_mean(name, names) or f"The {plural} are {', '.join(names)}."


def every_command(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the group itself and every command below it, with their full names from the program on."""
    yield path, group
    context = click.Context(group, info_name=path[-1])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name), command
