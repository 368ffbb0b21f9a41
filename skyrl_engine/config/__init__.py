"""Configuration: sources, structure, origins, reports.

Names are imported when first used: reading a schema needs no cattrs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_engine.config.json_schema import config_schema
    from skyrl_engine.config.reading.origins import Origin
    from skyrl_engine.config.reading.sources import Option, RawConfig, from_dict, load
    from skyrl_engine.config.resolution import ResolvedConfig, SelectedPlugin, resolve

__all__ = ["Option", "Origin", "RawConfig", "ResolvedConfig", "SelectedPlugin", "config_schema", "from_dict", "load", "resolve"]

_HOMES = {
    "Option": "reading.sources",
    "Origin": "reading.origins",
    "RawConfig": "reading.sources",
    "ResolvedConfig": "resolution",
    "SelectedPlugin": "resolution",
    "config_schema": "json_schema",
    "from_dict": "reading.sources",
    "load": "reading.sources",
    "resolve": "resolution",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
