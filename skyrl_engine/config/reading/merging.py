"""Merge `section.key=value` and options of a command into a table: each reaches its key, or is refused by name.

Options go over what a file says, and an override reaches into the tables and lists that options make: with `--env spell`,
`environments.0.weight=2` is the weight of spell. A position in a list counts from 0. A key given twice in the same way keeps its last value;
every other value that another one would replace is a problem.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from skyrl_engine.config.foreign_keys import RL, explain_path
from skyrl_engine.config.reading.origins import KeyPath, Origin, format_key, leaves
from skyrl_engine.config.reading.overrides import parse_override
from skyrl_engine.errors import Problem


@frozen
class Option:
    """A command's option by the name a person typed, for instance `Option("--steps", 20)`.

    Tables inside its value may hold further options: `Option("--reward", [{"use": "function", "data": Option("--data", "tasks.jsonl")}])`.
    """

    name: str
    value: Any


@frozen
class _Assignment:
    """A value for a key: `text` is what a person typed, `place` its number on the command line."""

    place: int
    text: str
    path: KeyPath
    value: Any
    origin: Origin
    inner: Mapping[KeyPath, Origin] = Factory(dict)
    """Origins of keys inside the value that another option gave."""


class _UnreachableError(Exception):
    """A key cannot be reached, because of what stands in the way."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


class MergedTable:
    """A table while overrides and options are merged into it, with the origin of every key that holds a value."""

    def __init__(self, table: dict[str, Any], origins: dict[str, Origin]) -> None:
        self.table = table
        self.origins = origins

    def merge(self, overrides: Sequence[str], options: Mapping[str, Option], folder: Path) -> list[Problem]:
        """Merge overrides and options, by their dotted keys; `folder` is what `./` in them is relative to. Returns every problem."""
        problems: dict[int, Problem] = {}
        typed: dict[KeyPath, _Assignment] = {}
        origin = Origin("command line", "command line", folder=folder)
        for place, text in enumerate(overrides):
            parsed = parse_override(text)
            if isinstance(parsed, Problem):
                problems[place] = parsed
                continue
            path, value = parsed
            # the last of several for one key
            typed.pop(path, None)
            typed[path] = _Assignment(place, text, path, value, origin)
        chosen = [
            _assign_option(place, tuple(key.split(".")), option, folder)
            for place, (key, option) in enumerate(options.items(), start=len(overrides))
        ]
        inside = [assignment for assignment in typed.values() if any(_is_inside(assignment.path, option.path) for option in chosen)]
        outside = [assignment for assignment in typed.values() if assignment not in inside]
        merged: list[_Assignment] = []
        for assignment in (*outside, *chosen, *inside):
            try:
                self._put(assignment)
            except _UnreachableError as error:
                problems[assignment.place] = Problem(
                    f"{assignment.origin}: {format_key(assignment.path)}", error.cause, error.remedy
                )
            else:
                merged.append(assignment)
        return [problem for _, problem in sorted(problems.items())] + list(self._find_replaced(merged))

    def _find_replaced(self, merged: Sequence[_Assignment]) -> Iterator[Problem]:
        """Yield a problem for every assignment that another one has replaced, in part or as a whole."""
        for number, assignment in enumerate(merged):
            if all(_is_kept(value, _value_at(self.table, path)) for path, value in leaves(assignment.value, assignment.path)):
                continue
            related = [
                other
                for other in merged[number + 1 :]
                if other.path[: len(assignment.path)] == assignment.path or assignment.path[: len(other.path)] == other.path
            ]
            by = related[-1]
            option, key = (assignment, by) if assignment.origin.kind == "option" else (by, assignment)
            where = format_key(max(option.path, key.path, key=len))
            yield Problem(f"{option.origin}: {where}", f"{key.text} is given too", "Give one of the two")

    def _put(self, assignment: _Assignment) -> None:
        """Set one key, replacing what was there. Raises _UnreachableError, and sets nothing, where a value or a list is in the way."""
        path, value = assignment.path, assignment.value
        place: Any = self.table
        reached: KeyPath = ()
        key: str | int
        for depth, part in enumerate(path):
            key = _position(place, part, reached, path) if isinstance(place, list) else str(part)
            reached = (*reached, key)
            if depth == len(path) - 1:
                place[key] = copy.deepcopy(value)
                break
            inner = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
            if not isinstance(inner, dict) and not _is_list_of_tables(inner):
                remedy = explain_path(path, RL) if reached == ("trainer",) else None
                raise _UnreachableError(
                    f"{format_key(reached)} holds a value, not a table", remedy or f"Set {format_key(reached)} as a whole"
                )
            place = inner
        name = format_key(reached)
        for known in [known for known in self.origins if known == name or known.startswith((f"{name}.", f"{name}["))]:
            del self.origins[known]
        for leaf, _ in leaves(value, reached):
            inside = (assignment.inner.get(leaf[:end]) for end in range(len(leaf), len(reached), -1))
            self.origins[format_key(leaf)] = next(filter(None, inside), assignment.origin)


def _assign_option(place: int, path: KeyPath, option: Option, folder: Path) -> _Assignment:
    """Return the assignment of an option, whose inner options are replaced by their values."""
    inner: dict[KeyPath, Origin] = {}

    def replace(value: Any, at: KeyPath) -> Any:
        if isinstance(value, Option):
            inner[at] = Origin("option", value.name, folder=folder)
            return replace(value.value, at)
        if isinstance(value, Mapping):
            return {key: replace(item, (*at, key)) for key, item in value.items()}
        return [replace(item, (*at, index)) for index, item in enumerate(value)] if isinstance(value, list) else value

    value = replace(option.value, path)
    return _Assignment(place, option.name, path, value, Origin("option", option.name, folder=folder), inner)


def _position(place: list[Any], part: str | int, reached: KeyPath, path: KeyPath) -> int:
    """Return the position in a list of tables that a part of a key means. Raises _UnreachableError where it is none."""
    name, text = format_key(reached), str(part)
    entries = f"{name} is a list of {len(place)} {'table' if len(place) == 1 else 'tables'}"
    if not text.isdecimal():
        rest = format_key(path[len(reached) :])
        raise _UnreachableError(f"{entries}, and {text!r} is no position in it", f"Write {name}.0.{rest} for the first of them")
    if int(text) >= len(place):
        raise _UnreachableError(
            f"{entries}, counted from 0", f"Write {name}.{len(place) - 1} for the last, or set {name} as a whole"
        )
    return int(text)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _is_inside(path: KeyPath, around: KeyPath) -> bool:
    return len(path) > len(around) and path[: len(around)] == around


def _is_kept(value: Any, there: Any) -> bool:
    """Say whether a value that was given is there; of an empty table, that a table is."""
    return there is value or there == value or (value == {} and isinstance(there, dict))


_NOTHING = object()


def _value_at(table: Any, path: KeyPath) -> Any:
    """Return the value of a key, or an object that equals nothing where there is none."""
    place = table
    for part in path:
        if isinstance(place, dict) and str(part) in place:
            place = place[str(part)]
        elif isinstance(place, list) and str(part).isdecimal() and int(part) < len(place):
            place = place[int(part)]
        else:
            return _NOTHING
    return place
