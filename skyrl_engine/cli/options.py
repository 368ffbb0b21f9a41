"""Options and arguments that several commands share, and the configuration they make together."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from skyrl_engine.config.trainers import TRAINERS
from skyrl_engine.registry.kinds import KINDS

if TYPE_CHECKING:
    from skyrl_engine.config import RawConfig

Function = TypeVar("Function", bound=Callable[..., Any])

OVERRIDES = "[section.key=value ...]"


def plugin_options(trainer: str | None = None, *, without: Collection[str] = ()) -> Callable[[Function], Function]:
    """Add an option for each kind of plugin that has one, such as `--loss`, which takes a reference.

    `trainer` leaves out the kinds that it does not use (None: those of any trainer stay); `without` leaves out more.
    """

    def decorate(function: Function) -> Function:
        used = TRAINERS[trainer].kinds if trainer is not None else tuple(KINDS)
        for kind in reversed(_kinds()):
            if kind in used and kind not in without:
                function = click.option(
                    f"--{kind}", metavar="REFERENCE", help=f"The {kind} plugin: name, distribution:name or ./file.py:name."
                )(function)
        return function

    return decorate


def _kinds() -> list[str]:
    return [kind.name for kind in KINDS.values() if kind.option]


def overrides_argument(function: Function) -> Function:
    """Add an argument that takes any number of `section.key=value`."""
    return click.argument("overrides", nargs=-1, metavar=OVERRIDES)(function)


def file_argument(*, required: bool) -> Callable[[Function], Function]:
    return click.argument("file", type=click.Path(path_type=Path), required=required, metavar="CONFIG" if required else "[CONFIG]")


def one_or_several(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> str | list[str] | None:
    """Return the value of an option that may be repeated as a key takes it: one text, a list of them, or None where it is not given."""
    return None if not given else given[0] if len(given) == 1 else list(given)


def flags_of(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return plugin options by the keys of the configuration that they set."""
    return {f"{kind}.use": choices[kind] for kind in _kinds() if choices.get(kind) is not None}


def load_config(file: Path | None, overrides: Sequence[str], flags: Mapping[str, Any] | None = None) -> "RawConfig":
    """Read a configuration; where the file may be left out, an override in its position counts as an override."""
    from skyrl_engine.config import load

    if file is not None and "=" in str(file) and not file.exists():
        return load(None, (str(file), *overrides), flags or {})
    return load(file, overrides, flags or {})
