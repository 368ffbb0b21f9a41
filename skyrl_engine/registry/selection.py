"""The plugins that a configuration blocks and pins."""

from collections.abc import Mapping, Sequence

from attrs import frozen

from skyrl_engine.errors import ConfigError, PluginNotFoundError, Problem
from skyrl_engine.registry.discovery import normalise
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.plugin_ref import PluginRef, parse
from skyrl_engine.registry.record import PluginRecord


@frozen
class Selection:
    """Blocked plugins, and pins: (kind, name) -> the distribution (normalised) that a bare name is taken from.

    A block is a reference: a bare name blocks it in every distribution, `distribution:name` there only, `distribution:*` all that the
    distribution offers, `./file.py:name` one of a local file.
    """

    block: tuple[PluginRef, ...]
    pins: Mapping[tuple[str, str], str]

    @classmethod
    def of(cls, block: Sequence[str], pin: Mapping[str, str]) -> "Selection":
        """Read `plugins.block` and `plugins.pin` ("kind:name" -> distribution) of a configuration. Raises ConfigError."""
        problems: list[Problem] = []
        blocked: list[PluginRef] = []
        pins: dict[tuple[str, str], str] = {}
        for entry in block:
            try:
                reference = parse(entry)
            except PluginNotFoundError as error:
                problems.append(Problem("plugins.block", error.cause, error.remedy))
                continue
            if reference.distribution in KINDS:  # a pin is written so; a block that blocks nothing must not go unnoticed
                cause = f"{entry!r} begins with a kind, where a block names a distribution"
                problems.append(Problem("plugins.block", cause, f"Write {reference.name!r}, or the distribution before the colon"))
            blocked.append(reference)
        for key, distribution in pin.items():
            kind, _, name = key.partition(":")
            if kind not in KINDS or not name:
                cause = f"{key!r} is not of the form kind:name"
                problems.append(Problem("plugins.pin", cause, f"Start it with one of {', '.join(f'{kind}:' for kind in KINDS)}"))
            pins[kind, name] = normalise(distribution)
        if problems:
            raise ConfigError(problems)
        return cls(tuple(blocked), pins)

    def blocks(self, record: PluginRecord) -> str | None:
        """Return the entry that blocks this plugin, None if none does."""
        return next((reference.text for reference in self.block if _covers(reference, record)), None)


def _covers(reference: PluginRef, record: PluginRecord) -> bool:
    if reference.distribution is not None and reference.distribution != record.distribution:
        return False
    if reference.path is not None and reference.path != record.path:
        return False
    return reference.name == record.name or (reference.name == "*" and (reference.distribution or reference.path) is not None)
