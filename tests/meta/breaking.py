"""Which promises a deliberately wrong plugin breaks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from skyrl_engine.testing import Finding, Promise, Subject
from skyrl_engine.testing.promise import drop_repeated_causes

FEW = 6
"""Examples of a promise that is expected to be kept."""


def broken_by(
    promises: Sequence[Promise[Any, Any]], make: Callable[..., Any], suspected: Collection[str] = (), *, examples: int, **more: Any
) -> Mapping[str, Finding]:
    """Findings by promise; those that are suspected are tried on so many examples. `more` as for `Subject`."""
    subject = Subject("test", make, **more)
    findings = drop_repeated_causes(
        [promise.hold(subject, examples=examples if promise.name in suspected else FEW) for promise in promises]
    )
    return {finding.promise: finding for finding in findings if finding.status == "broken"}


def require_broken(broken: Mapping[str, Finding], promises: Collection[str], words: str) -> None:
    """These and no others, and one of them for the reason that the words tell."""
    lines = [line for finding in broken.values() for line in finding.lines]
    assert set(broken) == set(promises), (sorted(broken), lines)
    assert any(words in line for line in lines), lines
