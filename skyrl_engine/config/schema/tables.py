"""Tables that select a plugin: `use`, and the plugin's own options."""

from collections.abc import Mapping
from typing import Any

from attrs import Factory, field, frozen
from attrs.validators import in_, min_len, optional

from skyrl_engine.config.schema.metadata import KIND
from skyrl_engine.contracts.values.model import PLACE
from skyrl_engine.contracts.values.roles import ROLES, Role


@frozen
class PluginTable:
    """A table that selects a plugin by `use`; every other key is an option of that plugin."""

    use: str = field(validator=min_len(1), metadata={PLACE: "reference"})
    """The plugin: `name`, `distribution:name`, or `./file.py:name`."""

    options: Mapping[str, Any] = Factory(dict)


@frozen
class TermTable(PluginTable):
    """A loss that is added to the objective, and its coefficient."""

    coef: float = field(kw_only=True)
    """Coefficient that multiplies the term's values."""

    on: Role | None = field(default=None, validator=optional(in_(tuple(ROLES))), kw_only=True)
    """Samples that the term is limited to: the `chosen` or the `rejected` ones of preferences; none: all. Weights stay those of all samples."""


@frozen
class LossTable(PluginTable):
    """The main loss, the terms added to it, and the corrections that multiply it."""

    terms: tuple[TermTable, ...] = field(default=(), metadata={KIND: "loss"})
    """Losses added to the main one, each multiplied by its `coef`: `[[loss.terms]]` with `use`, `coef` and the options of that loss."""

    corrections: tuple[PluginTable, ...] = field(default=(), metadata={KIND: "correction"})
    """Corrections that multiply the main loss, in this order: `[[loss.corrections]]` with `use` and the options of that correction."""
