"""The subject of promises: a maker of a plugin's product, and facts about the plugin."""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Generic, TypeVar

from attrs import field, frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.errors import PluginNotFoundError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.loader import load_object
from skyrl_engine.registry.owner import Owner
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.resolve import Registry

Product = TypeVar("Product")

CONTEXT = FactoryContext(seed=1, pad_token_id=0, max_sequence_length=1024)
"""The run, which factories under test get as their context; no case has a longer sample."""


@frozen(eq=False)
class Subject(Generic[Product]):
    """`make` builds a new product, so that what one case leaves in it cannot reach another. `plugin` is None for a bare product.

    `hooks` are what a suite offers beyond the product, by name: an `oracle`, a `reference`, `layouts`.
    """

    label: str
    make: Callable[[], Product]
    plugin: SelectedPlugin | None = None
    hooks: Mapping[str, Callable[..., Any]] = field(factory=lambda: MappingProxyType({}))
    flags: frozenset[str] = frozenset()

    @classmethod
    def of_plugin(cls, plugin: SelectedPlugin, **more: Any) -> "Subject[Any]":
        """Return the subject of an installed plugin or a local file."""
        return cls(str(plugin.loaded.record), lambda: plugin.make(CONTEXT), plugin, **more)

    def declares(self, flag: str) -> bool:
        """Return True where the product declares a capability, such as `batch_local`."""
        return bool(getattr(self.make(), flag, False))


def part_of(product: Product, label: str, kind: str) -> BoundPlugin[Product]:
    """Return a bare product as a part of a run; `label` names it in errors."""
    return BoundPlugin(product, Owner.of_unrecorded(label, kind), kind, "under_test")


def select_plugin(kind: str, plugin: object, options: Mapping[str, Any], base: Path | None = None) -> SelectedPlugin:
    """Select the plugin that a reference names, or the plugin itself, with these options. Raises as selecting it for a run does.

    A plugin itself is found again in other processes by its module and its name there; raises PluginNotFoundError for one without.
    """
    registry = _discover_installed(tuple(sys.path))
    if isinstance(plugin, str):
        return SelectedPlugin.of(registry.resolve(kind, plugin, base=base), dict(options), "options")
    record = next((candidate for candidate in registry.records(kind) if _is_at(candidate.target, plugin)), None)
    if record is None:
        module, name = _find_home(plugin)
        place = Path(str(module.__file__))
        record = PluginRecord.of_file(kind, place, name, place.read_bytes())
    return SelectedPlugin.of_loaded(load_object(record, plugin), dict(options), "options")


def _is_at(target: str, plugin: object) -> bool:
    """Say if an entry point's target is this object. Nothing is imported for it."""
    module, _, name = target.partition(":")
    return module in sys.modules and getattr(sys.modules[module], name, None) is plugin


def _find_home(plugin: object) -> tuple[ModuleType, str]:
    """Return the module that holds a plugin, and the name under which it does."""
    module_name = getattr(getattr(plugin, "function", None), "__module__", None) or type(plugin).__module__
    for module in filter(None, (sys.modules.get(module_name), *tuple(sys.modules.values()))):
        if getattr(module, "__file__", None):
            names = [name for name, value in tuple(vars(module).items()) if value is plugin]
            if names:
                return module, names[0]
    raise PluginNotFoundError(
        f"{plugin!r} is no value of a module, so that another process could not find it",
        remedy="Name it at the top of its file, my_plugin = MyPlugin(), and let the suite take it from there",
    )


@cache
def _discover_installed(_search_path: tuple[str, ...]) -> Registry:
    """Read the metadata of installed distributions once: a suite would otherwise read some hundred of them for each test."""
    return Registry.discover()
