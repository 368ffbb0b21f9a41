"""The subject of promises: a maker of a plugin's product, and facts about the plugin."""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from attrs import field, frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.registry.host import Owner
from skyrl_engine.registry.part import Part
from skyrl_engine.registry.resolve import Registry

Product = TypeVar("Product")

CONTEXT = FactoryContext(seed=1, pad_token_id=0, max_sequence_length=1024)
"""The run, as factories under test are told of it; no case has a longer sample."""


@frozen(eq=False)
class Subject(Generic[Product]):
    """`make` builds the product anew, so that what one case leaves behind in it cannot reach another. `plugin` is None for a bare product.

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


def part_of(product: Product, label: str, kind: str) -> Part[Product]:
    """Return a bare product as a part of a run; `label` names it in errors."""
    return Part(product, Owner.named(label, kind), kind, "under_test")


def selected(kind: str, reference: str, options: Mapping[str, Any], base: Path | None = None) -> SelectedPlugin:
    """Select the plugin that a reference names, with these options. Raises as selecting it for a run does."""
    record = _installed(tuple(sys.path)).resolve(kind, reference, base=base)
    return SelectedPlugin.of(record, dict(options), "options")


@cache
def _installed(_search_path: tuple[str, ...]) -> Registry:
    """Read the metadata of installed distributions once: a suite would otherwise read some hundred of them for each test."""
    return Registry.discover()
