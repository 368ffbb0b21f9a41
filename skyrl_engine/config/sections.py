"""The top-level keys of a configuration in their order: `trainer`, the engine's tables, a table per kind of plugin, the trainers' tables."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_args

import attrs
from attrs import frozen

from skyrl_engine.config.schema import KIND, EngineConfig
from skyrl_engine.config.trainers import Trainer, owners_of
from skyrl_engine.errors import ContractError
from skyrl_engine.registry.kinds import KINDS, TABLES, Kind, import_object


@frozen
class Section:
    """One top-level key: its type, its value where nobody gives it (`attrs.NOTHING`: somebody must), and the kind it selects plugins of.

    A `listed` section is a list of tables, each of which selects a plugin, and `schema` is the class of one of them.
    """

    name: str
    schema: Any
    default: Any
    kind: Kind | None = None
    listed: bool = False

    @property
    def required(self) -> bool:
        return self.default is attrs.NOTHING

    def belongs_to(self, trainer: Trainer) -> bool:
        """Return True where the trainer uses the kind, or owns the table, or the table is the engine's."""
        if self.kind is not None:
            return self.kind.name in trainer.kinds
        return self.name in trainer.tables or not owners_of(self.name)


def sections(trainer: Trainer | None = None) -> Mapping[str, Section]:
    """Return every top-level key of a configuration, by name; that of the own table of `trainer` too, where it has one."""
    own = {} if trainer is None or trainer.options is None else {trainer.name: _own_section(trainer)}
    return MappingProxyType({**_read_schema(), **own})


@cache
def _read_schema() -> Mapping[str, Section]:
    """Return every top-level key that is no trainer's own table, by name."""
    by_name: dict[str, Section] = {}
    for attribute in attrs.fields(attrs.resolve_types(EngineConfig)):
        if attribute.name == "trainer_options":
            continue
        if attribute.name == "selected":
            for name, kind in TABLES.items():
                schema = import_object(kind.table or "")
                by_name[name] = Section(name, schema, schema(kind.default), kind)
        elif KIND in attribute.metadata:
            schema, kind = get_args(attribute.type)[0], KINDS[attribute.metadata[KIND]]
            by_name[attribute.name] = Section(attribute.name, schema, attribute.default, kind, listed=True)
        else:
            by_name[attribute.name] = Section(attribute.name, attribute.type, attribute.default)
    return by_name


def _own_section(trainer: Trainer) -> Section:
    schema = import_object(str(trainer.options))
    if not attrs.has(schema):
        raise ContractError(
            f"the trainer {trainer.name} has {trainer.options} as its options, which is no attrs class",
            remedy="Ask its author to name an attrs class, or choose another trainer",
        )
    needed = any(field.init and field.default is attrs.NOTHING for field in attrs.fields(schema))
    return Section(trainer.name, schema, attrs.NOTHING if needed else schema())
