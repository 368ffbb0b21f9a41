"""`[plugins]`: which installed plugins may be used."""

from collections.abc import Mapping

from attrs import Factory, field, frozen
from attrs.validators import deep_iterable, min_len


@frozen
class PluginsConfig:
    """Which installed plugins may be used."""

    block: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    """References of plugins that must not be used."""

    pin: Mapping[str, str] = Factory(dict)
    """The distribution to take a plugin from, by `"kind:name"`, where several offer that name."""
