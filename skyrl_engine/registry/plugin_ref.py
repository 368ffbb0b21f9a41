"""References, the texts by which a user names a plugin: `ppo`, `acme-losses:ppo`, `./my_loss.py:my_loss`."""

import os
import re
from pathlib import Path

from attrs import frozen

from skyrl_engine.errors import PluginNotFoundError
from skyrl_engine.registry.discovery import normalise

_SEPARATORS = tuple(separator for separator in (os.sep, os.altsep, "/") if separator)


@frozen
class PluginRef:
    """A parsed reference: a name, and the distribution (normalised) or the local file it is asked from, or neither."""

    text: str
    name: str
    distribution: str | None = None
    path: Path | None = None


def parse(text: str, *, base: Path | None = None) -> PluginRef:
    """Read a reference; relative files are looked up from `base` (None: the working directory). Raises PluginNotFoundError."""
    origin, colon, name = text.strip().rpartition(":")
    if _is_file(text) and not (_is_file(origin) and name):
        raise PluginNotFoundError(
            f"{text!r} names a file but no plugin in it",
            remedy=f"Write {text.strip().rstrip(':')}:NAME with a name that the file defines",
        )
    if not name or (colon and not origin):
        raise PluginNotFoundError(f"{text!r} is no plugin reference", remedy="Write a name, distribution:name, or ./file.py:name")
    if not colon:
        return PluginRef(text, name)
    if _is_file(origin):
        return PluginRef(text, name, path=((base or Path.cwd()) / Path(origin).expanduser()).resolve())
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", origin):
        raise PluginNotFoundError(
            f"{origin!r} in {text!r} is no name of a distribution", remedy="Write a name, distribution:name, or ./file.py:name"
        )
    return PluginRef(text, name, distribution=normalise(origin))


def _is_file(origin: str) -> bool:
    return origin.rstrip(":").endswith(".py") or any(separator in origin for separator in _SEPARATORS)
