"""Every installed plugin keeps every promise it claims; new ones are held to them as soon as they are installed.

Backends start processes and load models, and environments need options: they are held by their own distributions' tests. So are all others
of this repository, with more examples, which is why this one waits for the night.
"""

import pytest

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.errors import ConfigError
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing import Subject, promises_of

ELSEWHERE = {"backend", "environment"}
RECORDS = [record for record in Registry.discover().records() if KINDS[record.kind].suite and record.kind not in ELSEWHERE]
FEW = 4  # the distributions' own tests draw many
TOGETHER = ("light_import",)
"""One interpreter for all of them together, in tests/architecture."""


@pytest.mark.nightly
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.kind}-{record.name}")
def test_an_installed_plugin_keeps_its_promises(record):
    try:
        subject = Subject.of_plugin(SelectedPlugin.of(record, {}, "test"))
    except ConfigError as error:
        if not all(problem.cause.startswith("is required") for problem in error.problems):
            raise
        pytest.skip(f"needs options, with which its own distribution holds it: {error}")
    promises = [each for each in promises_of(record.kind) if each.name not in TOGETHER]
    findings = [each.hold(subject, examples=FEW) for each in promises]
    wrong = [line for each in findings if each.status in ("broken", "undecided") for line in (each.promise, *each.lines)]
    assert wrong == []
    assert any(each.status == "kept" for each in findings)


def test_plugins_of_every_verifiable_kind_are_here():
    assert {record.kind for record in RECORDS} == {kind.name for kind in KINDS.values() if kind.suite} - ELSEWHERE
