"""Configuration: sources, structure, origins, reports.

Names are imported when first used: reading a schema needs no cattrs.
"""

from typing import TYPE_CHECKING

from skyrl_engine.lazy import lazily

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


__getattr__ = lazily(__name__, _HOMES)
