"""`plugins verify` blames no installed plugin, with its defaults and with each value that an option allows, and however few cases it draws.

Backends start processes and load models, and environments need options: they are held by their own distributions' tests.
"""

from importlib.util import find_spec

import pytest

from skyrl_engine.errors import ConfigError
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing.kit import verify
from skyrl_engine.testing.subject import select_plugin

ELSEWHERE = {"backend", "environment"}
WITHOUT_PACKAGES = set() if find_spec("trackio") else {"trackio"}
"""Plugins whose packages do not stand in the lock, which sessions of their own hold to the promises."""
RECORDS = [
    record for record in Registry.discover().records() if record.kind not in ELSEWHERE and record.name not in WITHOUT_PACKAGES
]
BY_DAY = ["collator:padded", "reducer:sum", "merger:list", "advantage:grpo", "group_filter:zero_variance", "observer:metrics_jsonl"]


def plugin(kind, name):
    try:
        return select_plugin(kind, name, {})
    except ConfigError as error:
        if not all(problem.cause.startswith("is required") for problem in error.problems):
            raise
        pytest.skip(f"needs options, with which its own distribution holds it: {error}")


def blame(verdict):
    return [line for finding in verdict.of_status("broken") for line in (finding.promise, *finding.lines)]


@pytest.mark.parametrize(
    ("kind", "name", "examples"),
    [
        *((*each.split(":"), 1) for each in BY_DAY),
        *(
            pytest.param(record.kind, record.name, examples, marks=pytest.mark.nightly)
            for record in RECORDS
            if record.kind != "generator"
            for examples in (1, 2, 3)
        ),
    ],
)
def test_few_cases_blame_nobody(kind, name, examples):
    assert not blame(verify(plugin(kind, name), examples=examples))


@pytest.mark.nightly
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.kind}-{record.name}")
def test_no_value_of_an_option_is_blamed(record):
    verdict = verify(plugin(record.kind, record.reference), given=())
    assert not blame(verdict)
    assert verdict.of_status("kept")


def test_plugins_of_every_verifiable_kind_are_here():
    assert {record.kind for record in RECORDS} == {*KINDS} - ELSEWHERE
