"""`key=value` after a command, and `--set KEY=VALUE` for the same. Imports no configuration, which commands about plugins do without."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

Function = TypeVar("Function", bound=Callable[..., Any])


def key_values(metavar: str, meaning: str) -> Callable[[Function], Function]:
    """Add an argument that takes any number of `key=value`, and `--set` for the same, which `overrides` holds after them."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call_with_settings(*arguments: Any, overrides: tuple[str, ...], settings: tuple[str, ...], **others: Any) -> Any:
            return function(*arguments, overrides=(*overrides, *settings), **others)

        option = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=meaning)
        decorated = click.argument("overrides", nargs=-1, metavar=metavar)(option(call_with_settings))
        return cast("Function", decorated)

    return decorate


options_argument = key_values("[key=value ...]", "An option of the plugin; the same as key=value.")
