"""Functions that a configuration names: `./file.py:name`, or `package.module:name`."""

import hashlib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl_engine.errors import DataError, PluginError
from skyrl_engine.hooks.decorators import FunctionPlugin
from skyrl_engine.registry.code_files import require_permission
from skyrl_engine.registry.local_module import local_module


def function_of(reference: str, noun: str = "function") -> Callable[..., Any]:
    """Return the function that a reference names, or what else can be called and is a `noun`, such as a class.

    Raises DataError where there is none, with what the file raised, and for one with options; PluginBlockedError for code that may not run:
    the plugin whose options name it was selected with another content of the file, or its configuration is not the caller's.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise DataError(f"{reference!r} names no {noun}", remedy="Write ./file.py:name, or package.module:name")
    try:
        module = _module_of(reference, place)
    except (DataError, PluginError):
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{place} cannot be imported: {type(error).__name__}: {error}", remedy="Correct the file") from error
    target = getattr(module, name, None)
    if isinstance(target, FunctionPlugin) and target.usable_alone:
        # decorated with @reward, it is a plugin as well; what is asked for here is the function
        target = target.function
        config = inspect.signature(target).parameters.get("config")
        if config is not None and config.default is config.empty:
            raise DataError(
                f"the reward {name} of {place} has options of its own, which it gets only as an environment",
                remedy=f'Choose it as one: --env {reference}, or [[environments]] with use = "{reference}"',
            )
    if not callable(target):
        suits = inspect.isclass if noun == "class" else inspect.isfunction
        candidates = [name for name, value in vars(module).items() if suits(value) and value.__module__ == module.__name__]
        raise DataError(
            f"{place} has no {noun} {name!r}", remedy=f"It has {', '.join(sorted(candidates)) or f'no {noun}'}; correct the name"
        )
    factory: Callable[..., Any] = target
    return factory


def content_of(reference: str) -> str:
    """Return a short hash of the file that a reference names, so that a changed file is noticed; empty for an installed module."""
    place = reference.rpartition(":")[0]
    return hashlib.sha256(Path(place).expanduser().read_bytes()).hexdigest()[:12] if place.endswith(".py") else ""


def _module_of(reference: str, place: str) -> ModuleType:
    """Import what a reference names, from the bytes that were looked at; a file that was imported already is not run again."""
    if not place.endswith(".py"):
        require_permission(reference, None)
        return importlib.import_module(place)
    path = Path(place).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"there is no file {path}" if isinstance(error, FileNotFoundError) else f"{path} cannot be read: {error.strerror}",
            remedy="Correct the path; it is relative to the configuration file",
        ) from error
    require_permission(reference, content)
    return local_module(path, content, siblings=True)
