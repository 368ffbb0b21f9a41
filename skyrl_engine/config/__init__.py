"""Configuration: sources, structure, origins, reports.

Names are imported when first used: reading a schema needs no cattrs.
"""

from typing import TYPE_CHECKING

from skyrl_engine.lazy import lazily

if TYPE_CHECKING:
    from skyrl_engine.config.json_schema import config_schema
    from skyrl_engine.config.reading.merging import Option
    from skyrl_engine.config.reading.origins import Origin
    from skyrl_engine.config.reading.sources import RawConfig, from_dict, load, override, with_defaults
    from skyrl_engine.config.resolution import Assumptions, ResolvedConfig, SelectedPlugin, resolve

__all__ = [
    "Assumptions",
    "Option",
    "Origin",
    "RawConfig",
    "ResolvedConfig",
    "SelectedPlugin",
    "config_schema",
    "from_dict",
    "load",
    "override",
    "resolve",
    "with_defaults",
]

_HOMES = {
    "Assumptions": "resolution",
    "Option": "reading.merging",
    "Origin": "reading.origins",
    "RawConfig": "reading.sources",
    "ResolvedConfig": "resolution",
    "SelectedPlugin": "resolution",
    "config_schema": "json_schema",
    "from_dict": "reading.sources",
    "load": "reading.sources",
    "override": "reading.sources",
    "resolve": "resolution",
    "with_defaults": "reading.sources",
}


__getattr__ = lazily(__name__, _HOMES)
