"""Other allowed values of a plugin's options, one option at a time: what a user may write, a plugin must keep promises with."""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.wording import bounds, list_allowed_members, list_allowed_values
from skyrl_engine.contracts.values.model import DESCRIBES
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.promise import Finding, Promise, Verdict
from skyrl_engine.testing.subject import Subject

FEWER = 8
"""A variant is tried on so many times fewer cases than the options that were given."""

_AT_A_BOUND = frozenset({"learns", "differentiable"})
"""Promises that a factor of 0, at the bound of what is allowed, may break by intention."""

_OF_THE_MODULE = frozenset({"light_import"})
"""Promises about what no option changes."""


def variants(plugin: SelectedPlugin, given: frozenset[str]) -> Iterator[tuple[str, SelectedPlugin, bool]]:
    """Yield "option = value", the plugin with that value, and if the value is a bound; options in `given` keep theirs, and so do
    those that describe the value of another (`DESCRIBES`).

    Values are all that an `in_` validator, a Literal or a bool allow, in a union too, and the bounds of `ge` and `le`; of a list whose
    members are so limited, each member alone; and none where that is allowed. What the options' class refuses, for instance next to another
    option's value, is left out.
    """
    schema = plugin.loaded.schema
    if schema is None:
        return
    for attribute in attrs.fields(attrs.resolve_types(schema)):
        key = attribute.alias or attribute.name
        if not attribute.init or key in given or key not in plugin.table or DESCRIBES in attribute.metadata:
            continue
        present = plugin.table[key]
        for value, bound in _list_allowed_values(attribute):
            if value == present and type(value) is type(present):
                continue
            try:
                other = SelectedPlugin.of(plugin.loaded.record, {**plugin.table, key: value}, "an allowed value")
            except EngineError:
                continue
            yield f"{key} = {'none' if value is None else repr(value)}", other, bound


def _list_allowed_values(attribute: "attrs.Attribute[Any]") -> list[tuple[Any, bool]]:
    kinds = _alternatives(attribute.type)
    named = list_allowed_values(attribute.validator) or tuple(value for kind in kinds for value in _values_of_type(kind))
    values: list[tuple[Any, bool]] = [(value, False) for value in named if isinstance(value, str | int | float)]
    # A number that may be none is most often the size of a limit, which at its bound refuses nearly all that is valid.
    if not values and attribute.type in (int, float):
        values = [(attribute.type(bound), True) for sign, bound in bounds(attribute.validator) if sign in (">=", "<=")]
    members = list_allowed_members(attribute.validator) or tuple(value for kind in kinds for value in _values_of_members(kind))
    values += [([value], False) for value in members if isinstance(value, str | int | float)]
    return [*values, *((None, False) for kind in kinds if kind is type(None))]


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _values_of_type(kind: Any) -> tuple[Any, ...]:
    """Return all values of a type that has few."""
    if kind is bool:
        return False, True
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _values_of_members(kind: Any) -> tuple[Any, ...]:
    """Return all values of the members of a list of any length, where there are few."""
    members = typing.get_args(kind)
    endless = typing.get_origin(kind) in (list, set, frozenset) or (typing.get_origin(kind) is tuple and members[1:] == (...,))
    return _values_of_type(members[0]) if endless else ()


def with_variants(
    verdict: Verdict, promises: tuple[Promise[Any, Any], ...], plugin: SelectedPlugin, given: frozenset[str], examples: int
) -> Verdict:
    """Return the verdict with the promises that another allowed value of an option breaks, each under the first such value."""
    findings = {finding.promise: finding for finding in verdict.findings}
    for label, other, bound in variants(plugin, given):
        spared = _OF_THE_MODULE | _AT_A_BOUND if bound else _OF_THE_MODULE
        tried = [each for each in promises if findings[each.name].status == "kept" and each.name not in spared]
        variant_verdict = Verdict.of(tried, Subject.of_plugin(other), examples=max(1, examples // FEWER))
        findings |= {each.promise: _prefix_cause(label, each) for each in variant_verdict.of_status("broken")}
    return Verdict(tuple(findings.values()))


def _prefix_cause(label: str, finding: Finding) -> Finding:
    return attrs.evolve(finding, cause=f"with {label}, which its options allow: {finding.cause}")
