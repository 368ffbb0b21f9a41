"""Other allowed values of a plugin's options, one option at a time: what a user may write, a plugin must keep promises with."""

import typing
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.wording import allowed_values, bounds
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
    """Yield "option = value", the plugin with that value, and if the value is a bound; options in `given` keep theirs.

    Values are all that an `in_` validator, a Literal or a bool allow, and the bounds of `ge` and `le`. What the options' class refuses, for
    instance beside another option's value, is left out.
    """
    schema = plugin.loaded.schema
    if schema is None:
        return
    for attribute in attrs.fields(attrs.resolve_types(schema)):
        key = attribute.alias or attribute.name
        if not attribute.init or key in given or key not in plugin.table:
            continue
        present = plugin.table[key]
        for value, bound in _allowed(attribute):
            if value == present and type(value) is type(present):
                continue
            try:
                other = SelectedPlugin.of(plugin.loaded.record, {**plugin.table, key: value}, "an allowed value")
            except EngineError:
                continue
            yield f"{key} = {value!r}", other, bound


def _allowed(attribute: "attrs.Attribute[Any]") -> list[tuple[Any, bool]]:
    kind = attribute.type
    named = allowed_values(attribute.validator) or (typing.get_args(kind) if typing.get_origin(kind) is Literal else ())
    if kind is bool:
        named = (False, True)
    values = [(each, False) for each in named if isinstance(each, str | int | float)]
    if not values and kind in (int, float):
        values = [(kind(bound), True) for sign, bound in bounds(attribute.validator) if sign in (">=", "<=")]
    return values


def with_variants(
    verdict: Verdict, promises: tuple[Promise[Any, Any], ...], plugin: SelectedPlugin, given: frozenset[str], examples: int
) -> Verdict:
    """Return the verdict with the promises that another allowed value of an option breaks, each under the first such value."""
    findings = {finding.promise: finding for finding in verdict.findings}
    for label, other, bound in variants(plugin, given):
        spared = _OF_THE_MODULE | _AT_A_BOUND if bound else _OF_THE_MODULE
        tried = [each for each in promises if findings[each.name].status == "kept" and each.name not in spared]
        found = Verdict.of(tried, Subject.of_plugin(other), examples=max(1, examples // FEWER))
        findings |= {each.promise: _under(label, each) for each in found.of_status("broken")}
    return Verdict(tuple(findings.values()))


def _under(label: str, finding: Finding) -> Finding:
    return attrs.evolve(finding, cause=f"with {label}, which its options allow: {finding.cause}")
