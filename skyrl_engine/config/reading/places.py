"""`./` and `../` in a configuration are relative to where they were written: the file's folder, or the current one on a command line.

The schema says which texts name places: fields of type `Path`, and fields marked with `PLACE`. They become absolute, so that a
configuration that is written out and read elsewhere still means the same files. So does the name of something that is in the current
folder, such as `models/small`, where a place is expected. Everything else keeps its text.
"""

import typing
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from skyrl_engine.config.reading.origins import KeyPath, Origin, nearest
from skyrl_engine.config.schema import PLACE


def absolute_place(text: Any, folder: Path | None, *, reference: bool = False) -> Any:
    """Return a text that starts with `./` or `../`, or names what is in the current folder or at home, as an absolute path.

    A plugin's `reference` keeps its `:name`, and is a path only where it starts so. Any other text stays as it is.
    """
    if not isinstance(text, str):
        return text
    if text.startswith(("./", "../")):
        return text if folder is None else str(folder.absolute() / text)
    if reference or not text:
        return text
    return str(Path(text).expanduser().absolute()) if _exists(text) else text


def with_absolute_places(schema: type[Any], table: Any, path: KeyPath, origins: Mapping[str, Origin]) -> Any:
    """Return `table`, which is not yet checked, with the places that `schema` marks made absolute."""
    if not isinstance(table, Mapping):
        return table
    attributes = {attribute.alias or attribute.name: attribute for attribute in attrs.fields(attrs.resolve_types(schema))}
    placed: dict[str, Any] = {}
    for key, value in table.items():
        attribute = attributes.get(key)
        kinds = set() if attribute is None else _kinds_inside(attribute.type)
        nested = next((kind for kind in kinds if attrs.has(kind)), None)
        if attribute is not None and (attribute.metadata.get(PLACE) or Path in kinds):
            folder = nearest(origins, (*path, key)).folder
            place = partial(absolute_place, folder=folder, reference=attribute.metadata.get(PLACE) == "reference")
            placed[key] = [place(item) for item in value] if isinstance(value, list) else place(value)
        elif nested is not None:
            placed[key] = _resolve_nested(nested, value, (*path, key), origins)
        else:
            placed[key] = value
    return placed


def absent_places(schema: type[Any], value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield every key of a table, and of those inside it, that names a place on this machine where nothing is, with that place.

    `value` is the table, an instance of `schema` or not yet checked. Names that may be of something elsewhere, such as a hub id, are left to
    whoever reads them.
    """
    if not isinstance(value, (Mapping, schema)):
        return
    for attribute in attrs.fields(attrs.resolve_types(schema)):
        name, kind = attribute.alias or attribute.name, attribute.metadata.get(PLACE)
        entry: Any = value.get(name) if isinstance(value, Mapping) else getattr(value, attribute.name)
        key = (*path, name)
        listed = isinstance(entry, (list, tuple))
        if kind in ("path", "reference"):
            for text in entry if listed else (entry,):
                place = "" if not isinstance(text, str) else text.rpartition(":")[0] if kind == "reference" else text
                if place.startswith(("/", "./", "../", "~")) and not _exists(place):
                    yield key, place
        elif nested := next(filter(attrs.has, _kinds_inside(attribute.type)), None):
            for place_of_item, item in enumerate(entry) if listed else (("", entry),):
                yield from absent_places(nested, item, (*key, place_of_item) if listed else key)


def _exists(place: str) -> bool:
    try:
        return Path(place).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        # too long for a path, a zero byte in it, no home
        return False


def _resolve_nested(schema: type[Any], value: Any, path: KeyPath, origins: Mapping[str, Origin]) -> Any:
    if isinstance(value, list):
        return [_resolve_nested(schema, item, (*path, index), origins) for index, item in enumerate(value)]
    return with_absolute_places(schema, value, path, origins)


def _kinds_inside(kind: Any) -> set[Any]:
    """Return the types that a field's type is made of: `tuple[Term, ...] | None` is made of Term and None."""
    arguments = typing.get_args(kind)
    return set().union(*(_kinds_inside(argument) for argument in arguments)) if arguments else {kind}
