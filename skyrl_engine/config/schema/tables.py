"""Tables that select a plugin: `use`, and beside it the plugin's own options."""

from collections.abc import Mapping
from typing import Any

from attrs import Factory, field, frozen
from attrs.validators import min_len

from skyrl_engine.config.schema.metadata import KIND
from skyrl_engine.contracts.values.model import PLACE


@frozen
class PluginTable:
    """`use` is a plugin reference; `options` the rest of the table, as plain values."""

    use: str = field(validator=min_len(1), metadata={PLACE: True})
    """The plugin: `name`, `distribution:name`, or `./file.py:name`."""

    options: Mapping[str, Any] = Factory(dict)


@frozen
class TermTable(PluginTable):
    """A further term of the objective: a loss, and how much it counts."""

    coef: float = field(kw_only=True)
    """Coefficient that multiplies the term's values."""


@frozen
class LossTable(PluginTable):
    """The main loss, what is added to it, and what corrects it."""

    terms: tuple[TermTable, ...] = field(default=(), metadata={KIND: "loss"})
    """Losses added to the main one, each times its `coef`: `[[loss.terms]]` with `use`, `coef` and the options of that loss."""

    corrections: tuple[PluginTable, ...] = field(default=(), metadata={KIND: "correction"})
    """Corrections of the main loss, in order: `[[loss.corrections]]` with `use` and the options of that correction."""
