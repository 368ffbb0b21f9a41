"""Keys of the metadata of configuration fields."""

from collections.abc import Iterator
from typing import Any

import attrs

KIND = "skyrl_engine.kind"
"""Key of the metadata of a plugin table's field that lists further plugin tables: the kind of plugin that they select."""

READ_BY = "skyrl_engine.read_by"
"""Key of the metadata of a field that only some values of another field of its table read: the other field's name, and those values."""


def iterate_unread_fields(table: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the fields that nothing reads in such a table: the name, the name of the field that decides, and the values that read it."""
    for attribute in attrs.fields(type(table)):
        other, readers = attribute.metadata.get(READ_BY, (None, ()))
        if other is not None and getattr(table, other) not in readers:
            yield attribute.name, other, readers
