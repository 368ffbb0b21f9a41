"""`section.key=value` from a command line: the key is a dotted TOML key, the value a TOML value or a bare word."""

import tomllib
from pathlib import Path
from typing import Any

from skyrl_engine.config.reading.origins import KeyPath
from skyrl_engine.errors import Problem


def parse_override(text: str) -> tuple[KeyPath, Any] | Problem:
    """Return key path and value of an override, or the problem with it. A value that is not TOML is text, unless it starts like TOML."""
    key, equals, value = text.partition("=")
    if not equals:
        remedy = "Put the file first, section.key=value after it" if Path(text).is_file() else "Write section.key=value"
        return Problem(f"command line: {text}", "is not an override", remedy)
    path = _key_path(key.strip())
    if path is None:
        return Problem(f"command line: {text}", f"{key.strip()!r} is not a dotted key", "Write section.key=value")
    value = value.strip()
    if not value:
        return Problem(
            f"command line: {text}",
            "has no value",
            f"Write {key.strip()}=none for no value, or {key.strip()}='\"\"' for empty text",
        )
    is_toml, parsed = _toml_value(value)
    if is_toml:
        return path, parsed
    if value[0] in "[{\"'":
        return Problem(
            f"command line: {text}",
            "the value is not TOML",
            "Close every bracket and quote, and quote text inside lists and tables",
        )
    return path, value


def _key_path(key: str) -> KeyPath | None:
    if "\n" in key or "#" in key:
        return None
    try:
        table = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    value: Any = table
    while isinstance(value, dict):
        ((name, value),) = value.items()
        path.append(name)
    return tuple(path)


def _toml_value(text: str) -> tuple[bool, Any]:
    """Read the text as one TOML value: True and the value, or False where it is more (a comment, a second line) or less than that."""
    try:
        listed = tomllib.loads(f"value = [{text}]")
        alone = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, ValueError):
        return False, None
    value = alone.get("value")
    # Dates are no values of a configuration: 2024-01-01 is a revision's name.
    return listed == {"value": [value]} and isinstance(value, (str, int, float, list, dict)), value
