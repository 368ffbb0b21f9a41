"""Plain words for configuration mistakes: what was expected, what was found, and what may have been meant."""

import enum
import json
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import attrs

from skyrl_engine.near_words import did_you_mean


class RefusedError(ValueError):
    """A value that cannot be used: `cause` without final stop, `remedy` one action.

    `about` says what is wrong with: the value, a key that is "missing", or a "stray" key that resembles none of its table.
    """

    def __init__(self, cause: str, remedy: str, *, about: Literal["value", "missing", "stray"] = "value") -> None:
        self.cause = cause
        self.remedy = remedy
        self.about = about
        super().__init__(cause)


def format_value(value: object) -> str:
    """Return a value as TOML writes it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def choices(values: Iterable[object]) -> str:
    return ", ".join(format_value(value) for value in values)


_SCALARS: Mapping[Any, tuple[str, str]] = {
    int: ("a whole number", "Write a whole number such as 8, without quotes and decimal point"),
    float: ("a number", "Write a number such as 0.5, without quotes"),
    bool: ("true or false", "Write true or false, without quotes"),
    str: ("text", "Put it in quotes"),
    Path: ("a path", "Write a path in quotes"),
    type(None): ("none", 'Write "none"'),
}


def describe_type(kind: Any) -> str:
    """Say in words which values a type takes: "a whole number", `one of "a", "b"`, "a list of numbers, or none"."""
    if kind in _SCALARS:
        return _SCALARS[kind][0]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return describe_type(arguments[0])
    if origin is Literal:
        return f"one of {choices(arguments)}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {choices(member.value for member in kind)}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in sorted(arguments, key=lambda argument: argument is type(None)))
    if origin is tuple and arguments[-1:] != (...,):
        return f"a list of {len(arguments)}: {', '.join(describe_type(argument) for argument in arguments)}"
    if attrs.has(origin or kind) or _is_class(origin or kind, Mapping):
        return "a table"
    if _is_class(origin or kind, Collection):
        return "a list"
    return "any value" if kind is Any else getattr(kind, "__name__", str(kind))


def _is_class(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def wrong_kind(value: object, kind: Any) -> RefusedError:
    """Return the refusal of a value whose kind is not the expected one."""
    words = describe_type(kind)
    if kind is int and type(value) is float and value.is_integer():
        return RefusedError(f"must be {words}, is {format_value(value)}", f"Write {int(value)}")
    if isinstance(kind, type) and kind in _SCALARS:
        return RefusedError(f"must be {words}, is {format_value(value)}", _SCALARS[kind][1])
    return RefusedError(f"must be {words}, is {format_value(value)}", f"Write {words}")


_SAME: Mapping[str, str] = {
    "gpu": "cuda",
    "local": "inline",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
"""Words of other programs, in lower case, and the value that each stands for here."""


def not_a_choice(value: object, allowed: Collection[object]) -> RefusedError:
    """Return the refusal of a value that is none of those allowed, with the one that was meant."""
    same = _SAME.get(value.lower()) if isinstance(value, str) else None
    if same is not None and same in allowed:
        return RefusedError(f"must be one of {choices(allowed)}, is {format_value(value)}", f"Did you mean {format_value(same)}?")
    meant = (
        did_you_mean(value, [choice for choice in allowed if isinstance(choice, str)], show=format_value)
        if isinstance(value, str)
        else None
    )
    return RefusedError(f"must be one of {choices(allowed)}, is {format_value(value)}", meant or "Choose one of them")


_COMPARISON = re.compile(r"'(?P<name>[^']+)' must be (?P<sign>>=|<=|>|<) (?P<bound>\S+?): (?P<value>.*)", re.DOTALL)
_LENGTH = re.compile(r"Length of '(?P<name>[^']+)' must be (?P<sign>>=|<=) (?P<bound>\d+): (?P<value>\d+)")
_COMPARED = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def bounds(validator: Any) -> Iterator[tuple[str, float]]:
    """Yield sign and bound of attrs' number validators, alone, combined or inside `optional`; other validators give none."""
    for inner in (*getattr(validator, "_validators", ()), getattr(validator, "validator", None)):
        yield from bounds(inner) if inner is not None else ()
    sign, bound = getattr(validator, "compare_op", None), getattr(validator, "bound", None)
    if sign in _COMPARED and isinstance(bound, (int, float)):
        yield sign, bound


def list_allowed_values(validator: Any) -> tuple[Any, ...]:
    """Return the values that attrs' `in_` validator allows, alone, combined or inside `optional`; none without one."""
    own = getattr(validator, "options", None)
    if isinstance(own, Collection) and not isinstance(own, str):
        return tuple(own)
    inner = (*getattr(validator, "_validators", ()), getattr(validator, "validator", None))
    return next((values for nested in inner if nested is not None and (values := list_allowed_values(nested))), ())


def list_allowed_members(validator: Any) -> tuple[Any, ...]:
    """Return the values that attrs' `deep_iterable(in_(...))` allows as members, alone, combined or inside `optional`; none without one."""
    member = getattr(validator, "member_validator", None)
    if member is not None:
        return list_allowed_values(member)
    inner = (*getattr(validator, "_validators", ()), getattr(validator, "validator", None))
    return next((values for nested in inner if nested is not None and (values := list_allowed_members(nested))), ())


def bounds_in_words(validator: Any) -> str:
    """For instance "at least 0.0 and less than 1.0"; empty without bounds."""
    return " and ".join(f"{_COMPARED[sign]} {bound}" for sign, bound in bounds(validator))


def plain_refusal(error: Exception) -> RefusedError:
    """Put what a validator of an attrs class raised into plain words; a message this file does not know is kept."""
    if isinstance(error, RefusedError):
        return error
    message = str(error.args[0]) if error.args else type(error).__name__
    if comparison := _COMPARISON.fullmatch(message):
        direction = "larger" if comparison["sign"].startswith(">") else "smaller"
        cause = f"must be {_COMPARED[comparison['sign']]} {comparison['bound']}, is {comparison['value']}"
        return RefusedError(cause, f"Choose a {direction} number")
    if length := _LENGTH.fullmatch(message):
        if (length["sign"], length["bound"], length["value"]) == (">=", "1", "0"):
            return RefusedError("must not be empty", "Give a value")
        return RefusedError(
            f"must have a length of {_COMPARED[length['sign']]} {length['bound']}, has {length['value']}", "Change its length"
        )
    if len(error.args) == 4 and message.startswith("'") and " must be in " in message:
        return not_a_choice(error.args[3], tuple(error.args[2]))
    cause = re.sub(r"^'[^']+' (?=must)", "", message).rstrip(".")
    return RefusedError(" ".join(cause.split()) or type(error).__name__, "Choose an allowed value")
