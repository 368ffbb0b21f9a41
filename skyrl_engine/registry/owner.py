"""The owner of plugin code: any error of that code names its owner, the place that failed, and what a user can do."""

import asyncio
import importlib
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from skyrl_engine.errors import EngineError, PluginBrokenError
from skyrl_engine.near_words import find_near_word
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.record import PluginRecord

_ENGINE = Path(__file__).parents[1]
_ON_THE_WAY = (*(f"{folder}{os.sep}" for folder in (_ENGINE, Path(importlib.__file__).parent, Path(asyncio.__file__).parent)), "<")
"""Beginnings of file names, and of generated code, that come between the engine's call and the plugin's own code in a traceback."""


@frozen
class Owner:
    """The owner of plugin code: `label` names it in errors, `remedy` says what a user can do about a failure."""

    label: str
    remedy: str

    @classmethod
    def of(cls, record: PluginRecord) -> "Owner":
        """Return the owner of a recorded plugin: a local file can be corrected, a distribution upgraded."""
        action = f"Correct {record.path}" if record.source == "file" else f"Upgrade {record.distribution}"
        return cls(str(record), f"{action}, or {KINDS[record.kind].alternative}")

    @classmethod
    def of_unrecorded(cls, label: str, kind: str) -> "Owner":
        """Return the owner of a product of this kind that comes from no recorded plugin, such as one that a test makes."""
        return cls(label, f"Correct it, or {KINDS[kind].alternative}")


@contextmanager
def blame(owner: Owner, doing: str) -> Iterator[None]:
    """Turn any error of plugin code into PluginBrokenError; an EngineError, which a plugin raises on purpose, passes."""
    try:
        yield
    except (EngineError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise PluginBrokenError(
            f"{owner.label} failed in {doing}: {describe(error)}",
            remedy=owner.remedy,
            details=[place_of(error)],
        ) from error


def place_of(error: BaseException) -> str:
    """Return file, line and function that an error of a plugin's code was raised in, for its author to look at."""
    place = _place(error)
    return f"{place.filename}, line {place.lineno}, in {place.name}"


def _place(error: BaseException) -> traceback.FrameSummary:
    """Return the innermost frame in the plugin's own folder, which its author can change; without one, the innermost frame of all. A
    syntax error has no frame and names its own place.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return traceback.FrameSummary(error.filename, error.lineno, "<module>")
    frames = traceback.extract_tb(error.__traceback__)
    reached = [frame for frame in frames if not frame.filename.startswith(_ON_THE_WAY)]
    home = Path(reached[0].filename).parent if reached else None
    own = [frame for frame in reached if home in Path(frame.filename).parents]
    return (own or frames)[-1]


def describe(error: BaseException) -> str:
    """Return type and message of an exception on one line, without final stop."""
    message = " ".join(str(error).split()).rstrip(".")
    # a plugin's own message says what to do
    if (
        isinstance(error, AttributeError)
        and message.endswith(f"has no attribute {error.name!r}")
        and (near := _nearest_attribute(error))
    ):
        message += f"; did you mean {near!r}?"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _nearest_attribute(error: AttributeError) -> str | None:
    """Return the attribute whose name is most like the one that was asked for; None where none is like it."""
    if error.obj is None or error.name is None:
        return None
    names = [name for name in dir(error.obj) if not name.startswith("_") and name != error.name]
    return find_near_word(error.name, names, cutoff=0.75)
