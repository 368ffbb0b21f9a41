"""`[plugins]`: plugins that are excluded, and distributions that names are taken from."""

from collections.abc import Mapping

from attrs import Factory, field, frozen
from attrs.validators import deep_iterable, min_len


@frozen
class PluginsConfig:
    """Plugins that are excluded, and distributions that names are taken from."""

    block: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    """References of plugins that must not be used."""

    pin: Mapping[str, str] = Factory(dict)
    """Distributions by `"kind:name"`: the one to take a plugin from where several offer that name."""
