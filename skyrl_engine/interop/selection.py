"""The plugin that a caller names, or hands over as it is, for a part that is used without a configuration."""

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_engine.errors import ContractError

if TYPE_CHECKING:
    from skyrl_engine.config import SelectedPlugin
    from skyrl_engine.registry.loaded import LoadedPlugin
    from skyrl_engine.registry.resolve import Registry

Options = Mapping[str, Any]
NO_OPTIONS: Options = {}


def load_plugin(registry: "Registry", kind: str, plugin: object) -> "LoadedPlugin":
    """Load the plugin that a name means, or take a plugin itself, which no other process has to find.

    Raises ContractError for a plain function, and what resolving and loading raise.
    """
    from skyrl_engine.registry.loader import load, load_object
    from skyrl_engine.registry.record import PluginRecord

    if isinstance(plugin, str):
        return load(registry.resolve(kind, plugin))
    if inspect.isroutine(plugin):
        raise ContractError(
            f"{plugin.__name__} is a plain function, and not yet a plugin of the kind {kind}",
            remedy="Put the decorator of that kind above it, such as @skyrl_engine.reward() or @skyrl_engine.loss(...)",
        )
    home = getattr(plugin, "function", type(plugin))
    module = home.__module__ or "__main__"  # what `exec` defines may be of no module
    place = getattr(sys.modules.get(module), "__file__", None) or module
    return load_object(PluginRecord.of_file(kind, Path(place), str(getattr(plugin, "name", home.__name__)), b""), plugin)


def select_plugin(registry: "Registry", kind: str, plugin: object, options: Options) -> "SelectedPlugin":
    """Load a plugin as `load_plugin` does, with its options. Raises ConfigError for those, and what loading raises."""
    from skyrl_engine.config import SelectedPlugin

    return SelectedPlugin.of_loaded(load_plugin(registry, kind, plugin), dict(options), f"{kind}_options")
