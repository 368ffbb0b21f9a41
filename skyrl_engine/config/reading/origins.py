"""Keys of a configuration as paths, and where each value came from."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

KeyPath = tuple[str | int, ...]
"""A key's place: table names and keys as text, positions in a list as numbers."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@frozen
class Origin:
    """The source of a value. `label` is what a person reads: "train.toml", "command line", "--loss", "default".

    `line` counts from 1 where the source has lines; `folder` is what `./` and `../` in the value are relative to.
    """

    kind: Literal["file", "command line", "option", "default"]
    label: str
    line: int | None = None
    folder: Path | None = None

    def __str__(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"


DEFAULT = Origin("default", "default")


def format_key(path: KeyPath) -> str:
    """A path as a dotted TOML key, list positions in brackets: `loss.terms[1].coef`, `plugins.pin."loss:ppo"`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            escaped = part.replace("\\", "\\\\").replace('"', '\\"')
            text += ("." if text else "") + (part if _BARE.fullmatch(part) else f'"{escaped}"')
    return text


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every key that holds a value. Tables and lists of tables are walked; another list, and an empty table, is a value."""
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def nearest(origins: Mapping[str, Origin], path: KeyPath) -> Origin:
    """The origin of a key, else of the closest table around it whose origin is known, else of the first key inside it."""
    for end in range(len(path), 0, -1):
        known = origins.get(format_key(path[:end]))
        if known is not None:
            return known
    inside = format_key(path)
    return next((origin for key, origin in origins.items() if key.startswith((f"{inside}.", f"{inside}["))), DEFAULT)
