"""Write to stdout and stderr. Commands write by these functions alone, or by `render.py`: none lets control characters through."""

from typing import Any

import click

from skyrl_engine.visible import in_quotes, visible


def echo(text: object = "", *, err: bool = False) -> None:
    """Write lines of text."""
    click.echo(visible(str(text)), err=err)


def echo_part(text: str) -> None:
    """Write a part of a line on stdout, at once."""
    click.echo(visible(text), nl=False)


def echo_json(value: Any, **options: Any) -> None:
    """Write a value as indented JSON, whose strings hold no control characters; `options` are those of `json.dumps`."""
    import json

    click.echo(in_quotes(json.dumps(value, **{"indent": 2, **options})))


def make_log_visible() -> None:
    """Let warnings that no log takes, which Python writes to stderr, hold no control characters."""
    import logging

    from skyrl_engine.run.log import VisibleFormatter

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter("%(message)s"))
