"""The engine's pluggy host: it registers plugin objects and calls their hooks."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, wraps
from typing import Any

import pluggy

from skyrl_engine.errors import PluginBrokenError
from skyrl_engine.hooks import spec
from skyrl_engine.hooks.markers import PROJECT
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.owner import Owner, blame

PAGE = "docs/reference/hooks.md"


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
        # pluggy keeps plugins in sets and compares them by value, which does not work for attrs classes; a holder is only itself.
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
        except Exception:  # whatever it is, nothing stays half registered
            self._manager.unregister(name=name)
            raise
        self._registered.append((owner, holder))
        return hooks

    def each(self, hook: str) -> Iterator[tuple[Owner, Any]]:
        """Call a hook of every registered object in the order of registration, and yield each object's owner and result."""
        holders = [holder for _, holder in self._registered]
        for owner, holder in self._registered:
            others = [other for other in holders if other is not holder]
            for result in self._manager.subset_hook_caller(hook, others)():
                yield owner, result

    def _check_names(self, hooks: Iterable[str], owner: Owner) -> None:
        """Refuse unknown hooks with a suggestion; pluggy's check_pending refuses them too, but only after registration."""
        for hook in sorted(hooks):
            if not hasattr(self._manager.hook, hook):
                known = [name for name in vars(self._manager.hook) if name[0] != "_"]
                raise PluginBrokenError(
                    f"{owner.label} implements the unknown hook {hook}",
                    remedy=did_you_mean(hook, known, show=str) or f"Choose one of those in {PAGE}",
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
        if isinstance(inspect.getattr_static(plugin, name, None), property | cached_property):
            continue  # reading it would run plugin code
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is not None:
            hook = options["specname"] or name
            if not (options["optionalhook"] and not hasattr(manager.hook, hook)):
                yield name, (hook, _wrap_with_blame(getattr(plugin, name), hook, owner))


def _wrap_with_blame(function: Callable[..., Any], hook: str, owner: Owner) -> Callable[..., Any]:
    """Wrap the function, keeping its options and signature: any error but the engine's own then names plugin, hook and place."""
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def reporting_wrapper(*arguments: Any) -> Any:
            with blame(owner, hook):
                return (yield from function(*arguments))

        return reporting_wrapper

    @wraps(function)
    def reporting(*arguments: Any) -> Any:
        with blame(owner, hook):
            return function(*arguments)

    return reporting


def _reason(error: pluggy.PluginValidationError) -> str:
    """Pluggy's message without its first line, which names the plugin in pluggy's own way."""
    lines = str(error).splitlines()
    return " ".join(" ".join(lines[1:] or lines).split()).rstrip(".")
