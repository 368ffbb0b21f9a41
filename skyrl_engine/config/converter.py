"""The strict converter: plain values to attrs classes, nothing coerced, every mistake collected.

`"1"` is no number, `1` is not true, `2.0` is no whole number; a whole number is accepted where a number is wanted. Numbers are finite.
TOML has no null: the word "none" (and YAML's null) means no value wherever a key may have none.
"""

import enum
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Union

import attrs
from cattrs import AttributeValidationNote, BaseValidationError, ClassValidationError, Converter, IterableValidationNote
from cattrs.errors import IterableValidationError, StructureHandlerNotFoundError

from skyrl_engine.config.foreign_keys import is_known
from skyrl_engine.config.reading.origins import KeyPath
from skyrl_engine.config.wording import RefusedError, format_value, not_a_choice, plain_refusal, wrong_kind
from skyrl_engine.near_words import did_you_mean

NONE_WORD = "none"

_COLLECTIONS: Mapping[Any, Callable[[list[Any]], Any]] = {
    list: list,
    MutableSequence: list,
    tuple: tuple,
    Sequence: tuple,
    Collection: tuple,
    Iterable: tuple,
    set: set,
    frozenset: frozenset,
    AbstractSet: frozenset,
}
_MAPPINGS = (dict, Mapping, MutableMapping)


@cache
def strict_converter() -> Converter:
    """Return the converter of configurations. Structuring raises cattrs' exception groups; `refusals` flattens them."""
    converter = Converter(detailed_validation=True)
    for kind in (int, bool, str):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(Path, _path)
    converter.register_structure_hook(type(None), _nothing)
    converter.register_structure_hook_func(_is_literal, _literal)
    converter.register_structure_hook(enum.Enum, _enum)
    converter.register_structure_hook_func(lambda kind: _origin(kind) in (Union, types.UnionType), partial(_union, converter))
    converter.register_structure_hook_func(lambda kind: _origin(kind) in _COLLECTIONS, partial(_collection, converter))
    converter.register_structure_hook_func(lambda kind: _origin(kind) in _MAPPINGS, partial(_mapping, converter))
    converter.register_structure_hook_func(lambda kind: attrs.has(_origin(kind)), partial(_class, converter))
    return converter


def refusals(error: Exception, path: KeyPath = ()) -> list[tuple[KeyPath, RefusedError]]:
    """Every mistake inside what structuring raised, with the key it belongs to."""
    if isinstance(error, BaseValidationError):
        refused = []
        for inner in error.exceptions:
            refused += refusals(inner, (*path, *_path_of_notes(inner)))
        return refused
    if isinstance(error, StructureHandlerNotFoundError):
        return [(path, RefusedError("has a type that no configuration can hold", "Report it to the author of this table's schema"))]
    return [(path, plain_refusal(error))]


def _path_of_notes(error: BaseException) -> KeyPath:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return (note.name,)
        if isinstance(note, IterableValidationNote):
            return (note.index,)
    return ()


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind) or kind


def _exactly(value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise wrong_kind(value, kind)
    return value


def _number(value: Any, kind: Any) -> float:
    if type(value) not in (int, float):
        raise wrong_kind(value, kind)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RefusedError(
            f"must be a finite number, is {value if isinstance(value, float) else 'too large'}", "Write a finite number"
        )
    return number


def _path(value: Any, kind: Any) -> Path:
    if type(value) is not str:
        raise wrong_kind(value, kind)
    return Path(value)


def _nothing(value: Any, kind: Any) -> None:
    if value is not None and value != NONE_WORD:
        raise wrong_kind(value, kind)


def _literal(value: Any, kind: Any) -> Any:
    allowed = typing.get_args(kind)
    for choice in allowed:
        if type(choice) is type(value) and choice == value:
            return choice
    raise not_a_choice(value, allowed)


def _enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    for member in kind:
        if type(member.value) is type(value) and member.value == value:
            return member
    raise not_a_choice(value, [member.value for member in kind])


def _union(converter: Converter, value: Any, kind: Any) -> Any:
    """The member that takes the value; of several, the one that keeps its type (`2` stays whole in `float | int`)."""
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    optional = type(None) in typing.get_args(kind)
    if optional and (value is None or (value == NONE_WORD and not any(_offers_none_word(member) for member in members))):
        return None
    if len(members) == 1:
        try:
            return converter.structure(value, members[0])
        except RefusedError as refusal:
            # A scalar's refusal names its type alone; the key also takes "none".
            raise _widen(refusal, value, kind) from None
    taken = []
    for member in members:
        try:
            taken.append(converter.structure(value, member))
        except (RefusedError, BaseValidationError):
            continue
    if not taken:
        raise wrong_kind(value, kind)
    return next((result for result in taken if type(result) is type(value)), taken[0])


def _widen(refusal: RefusedError, value: Any, kind: Any) -> RefusedError:
    exact = wrong_kind(value, typing.get_args(kind)[0])
    return RefusedError(wrong_kind(value, kind).cause, refusal.remedy) if refusal.cause == exact.cause else refusal


def _offers_none_word(member: Any) -> bool:
    return typing.get_origin(member) is Literal and NONE_WORD in typing.get_args(member)


def _each(converter: Converter, items: Iterable[tuple[Any, Any, Any]], kind: Any) -> list[Any]:
    """Structure (place, value, type) one by one, every failure noted with its place."""
    results, errors = [], []
    for place, value, item_kind in items:
        try:
            results.append(converter.structure(value, item_kind))
        except Exception as error:  # noqa: BLE001 -- whatever a plugin's schema raises is reported as a mistake at this place
            error.add_note(IterableValidationNote(f"at {place}", place, item_kind))
            errors.append(error)
    if errors:
        raise IterableValidationError(f"while structuring {kind}", errors, kind)
    return results


def _collection(converter: Converter, value: Any, kind: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise wrong_kind(value, kind)
    origin, arguments = _origin(kind), typing.get_args(kind)
    if origin is tuple and arguments and arguments[-1] is not ...:
        if len(value) != len(arguments):
            raise RefusedError(f"must be a list of {len(arguments)}, has {len(value)}", f"Write {len(arguments)} values")
        return tuple(_each(converter, zip(range(len(value)), value, arguments, strict=True), kind))
    item_kind = arguments[0] if arguments else Any
    return _COLLECTIONS[origin](_each(converter, ((index, item, item_kind) for index, item in enumerate(value)), kind))


def _mapping(converter: Converter, value: Any, kind: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise wrong_kind(value, kind)
    key_kind, item_kind = typing.get_args(kind) or (Any, Any)
    keys = _each(converter, ((key, key, key_kind) for key in value), kind)
    return dict(zip(keys, _each(converter, ((key, item, item_kind) for key, item in value.items()), kind), strict=True))


def _class(converter: Converter, value: Any, kind: Any) -> Any:
    """An attrs class out of a table: keys, types and validators are all checked before anything is raised."""
    if not isinstance(value, Mapping):
        raise wrong_kind(value, kind)
    cls = _origin(kind)
    attrs.resolve_types(cls)
    known = {_key(attribute): attribute for attribute in attrs.fields(cls) if attribute.init}
    structured: dict[str, Any] = {}
    errors: list[Exception] = []
    for key, item in value.items():
        try:
            if key not in known:
                raise unknown_key(key, known)
            structured[key] = converter.structure(item, Any if known[key].type is None else known[key].type)
        except Exception as error:  # noqa: BLE001 -- whatever a plugin's schema raises is reported as a mistake at this key
            errors.append(_at(error, key))
    errors += [
        _at(RefusedError("is required", "Give it a value", about="missing"), key)
        for key, attribute in known.items()
        if attribute.default is attrs.NOTHING and key not in value
    ]
    errors += _validator_errors(cls, known, structured)
    if not errors:
        try:
            return cls(**structured)
        except Exception as error:  # noqa: BLE001 -- a check over the whole table may raise anything
            errors.append(plain_refusal(error))
    raise ClassValidationError(f"while structuring {cls.__name__}", errors, cls)


def _key(attribute: "attrs.Attribute[Any]") -> str:
    return attribute.alias or attribute.name


def _at(error: Exception, key: str) -> Exception:
    error.add_note(AttributeValidationNote(f"at {key}", key, None))
    return error


def _validator_errors(
    cls: type[Any], known: "Mapping[str, attrs.Attribute[Any]]", structured: Mapping[str, Any]
) -> list[Exception]:
    """Run every attribute's validator; constructing the class would stop at the first that fails.

    A field with its own converter is left to the constructor, which converts before it validates.
    """
    draft: Any = object.__new__(cls)
    for key, item in structured.items():
        object.__setattr__(draft, known[key].name, item)
    errors: list[Exception] = []
    for key, item in structured.items():
        attribute = known[key]
        if attribute.validator is None or attribute.converter is not None:
            continue
        try:
            attribute.validator(draft, attribute, item)
        except AttributeError:
            # The validator reads another field that is not given or was refused: the constructor will call it again.
            continue
        except Exception as error:  # noqa: BLE001 -- a validator may raise anything to say no
            errors.append(_at(plain_refusal(error), key))
    return errors


def unknown_key(key: str, known: Iterable[str]) -> RefusedError:
    names = list(known)
    if not is_known(key) and (meant := did_you_mean(key, names, show=format_value)):
        return RefusedError("is not a known key", meant)
    listed = f"The keys here are {', '.join(names)}" if names else "Remove it: nothing can be set here"
    return RefusedError("is not a known key", listed, about="stray")
