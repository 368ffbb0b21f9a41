"""Keys that name code, as schemas mark them: the values of such keys decide which code is run."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from skyrl_engine.config.reading.origins import KeyPath
from skyrl_engine.contracts.values.model import BUILT_IN, CODE, PLACE


def names_code(attribute: "attrs.Attribute[Any]") -> bool:
    """Return True for a field that names code: a reference to a plugin or a function, or one that is marked with `CODE`."""
    return attribute.metadata.get(PLACE) == "reference" or bool(attribute.metadata.get(CODE))


def code_in(table: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the keys of a structured table that name code, and what they name, each as a text. Keys without a value name nothing, nor do
    names of the engine's own.
    """
    kind: type[Any] = type(table)
    if not attrs.has(kind):
        return
    for attribute in attrs.fields(kind):
        value, place = getattr(table, attribute.name), (*path, attribute.alias or attribute.name)
        if names_code(attribute):
            built_in = attribute.metadata.get(BUILT_IN, ())
            yield from ((place, text) for text in _texts(value) if text not in built_in)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from code_in(item, (*place, index))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from code_in(item, (*place, str(key)))
        else:
            yield from code_in(value, place)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _texts(item)
    elif value is not None and value != {}:
        yield json.dumps(value, default=str, sort_keys=True)
