"""The engine's pluggy host: it registers plugin objects, calls their hooks, and names the plugin whose code fails."""

import asyncio
import difflib
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pluggy
from attrs import frozen

import skyrl_engine
from skyrl_engine.errors import EngineError, PluginBrokenError
from skyrl_engine.hooks import spec
from skyrl_engine.hooks.markers import PROJECT
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.record import PluginRecord

PAGE = "docs/reference/hooks.md"
_ON_THE_WAY = (*(f"{Path(each).parent}{os.sep}" for each in (skyrl_engine.__file__, importlib.__file__, asyncio.__file__)), "<")
"""Beginnings of file names, and of generated code, that stand between the engine's call and the plugin's own code in a traceback."""


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


class PluginHost:
    """A plugin manager that knows every hook of the engine."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(spec)
        self._registered: list[tuple[Owner, _Holder]] = []

    @property
    def hook(self) -> Any:
        """Pluggy's relay: `host.hook.skyrl_engine_step_finished(event=...)` calls every registered object that implements the hook."""
        return self._manager.hook

    def register(self, plugin: object, owner: Owner) -> frozenset[str]:
        """Register an object's hook implementations, all checked against the specification, and return the names of its hooks.

        A refused object leaves no trace.

        Raises PluginBrokenError for an unknown hook, an argument that the hook does not offer, and a class in place of an instance.
        """
        if inspect.isclass(plugin):
            raise PluginBrokenError(
                f"{owner.label} is the class {plugin.__name__}, whose methods lack their instance",
                remedy="Point at an instance of it",
            )
        implementations = dict(_implementations(self._manager, plugin, owner))
        # pluggy keeps plugins in sets and compares them by value, which attrs classes do not stand; a holder is only itself.
        holder = _Holder({name: function for name, (_, function) in implementations.items()})
        hooks = frozenset(hook for hook, _ in implementations.values())
        self._check_names(hooks, owner)
        name = f"{owner.label} #{len(self._registered)}"
        try:
            self._manager.register(holder, name=name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._manager.unregister(name=name)
            raise PluginBrokenError(
                f"{owner.label} has a hook that does not fit: {_reason(error)}",
                remedy=f"Take only arguments that the hook offers; {PAGE} lists them",
            ) from error
        except Exception:  # whatever it is, nothing half registered stays behind
            self._manager.unregister(name=name)
            raise
        self._registered.append((owner, holder))
        return hooks

    def each(self, hook: str) -> Iterator[tuple[Owner, Any]]:
        """Call a hook of every registered object in the order of registration, and yield each object's owner and result."""
        holders = [holder for _, holder in self._registered]
        for owner, holder in self._registered:
            others = [other for other in holders if other is not holder]
            for given in self._manager.subset_hook_caller(hook, others)():
                yield owner, given

    def _check_names(self, hooks: Iterable[str], owner: Owner) -> None:
        """Refuse unknown hooks with a suggestion; pluggy's check_pending refuses them too, but only after registration."""
        for hook in sorted(hooks):
            if not hasattr(self._manager.hook, hook):
                close = difflib.get_close_matches(hook, [name for name in vars(self._manager.hook) if name[0] != "_"], n=1)
                raise PluginBrokenError(
                    f"{owner.label} implements the unknown hook {hook}",
                    remedy=f"Did you mean {close[0]}?" if close else f"Choose one of those in {PAGE}",
                )


class _Holder:
    """The hook implementations of one object, by attribute; compared and hashed by identity."""

    def __init__(self, implementations: dict[str, Callable[..., Any]]) -> None:
        vars(self).update(implementations)


def _implementations(
    manager: pluggy.PluginManager, plugin: object, owner: Owner
) -> Iterator[tuple[str, tuple[str, Callable[..., Any]]]]:
    """Return, for each attribute that implements a hook, the hook's name and the function, whose errors name the plugin."""
    for name in dir(plugin):
        if isinstance(inspect.getattr_static(plugin, name, None), property):
            continue  # reading it would run plugin code
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is not None:
            hook = options["specname"] or name
            if not (options["optionalhook"] and not hasattr(manager.hook, hook)):
                yield name, (hook, _reporting(getattr(plugin, name), hook, owner))


def _reporting(function: Callable[..., Any], hook: str, owner: Owner) -> Callable[..., Any]:
    """Wrap the function, keeping its options and signature: any error but the engine's own then names plugin, hook and place."""
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def reporting_wrapper(*arguments: Any) -> Any:
            with blaming(owner, hook):
                return (yield from function(*arguments))

        return reporting_wrapper

    @wraps(function)
    def reporting(*arguments: Any) -> Any:
        with blaming(owner, hook):
            return function(*arguments)

    return reporting


@contextmanager
def blaming(owner: Owner, doing: str) -> Iterator[None]:
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
    return next(iter(difflib.get_close_matches(error.name, names, n=1, cutoff=0.75)), None)


def _reason(error: pluggy.PluginValidationError) -> str:
    """Pluggy's message without its first line, which names the plugin in pluggy's own way."""
    lines = str(error).splitlines()
    return " ".join(" ".join(lines[1:] or lines).split()).rstrip(".")
