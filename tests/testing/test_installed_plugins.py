"""`plugins verify` blames no plugin of this repository, however few cases it draws: explicit ones, and cases that a promise is not about."""

import pytest

from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing.kit import verify
from skyrl_engine.testing.subject import selected

CHEAP = ("collator", "loss", "correction", "reducer", "merger", "advantage", "group_filter")
RECORDS = [
    record for record in Registry.discover().records() if record.kind in CHEAP and record.distribution.startswith("skyrl-engine-")
]
BY_DAY = ["collator:padded", "reducer:sum", "merger:list", "advantage:grpo", "group_filter:zero_variance"]


@pytest.mark.parametrize(
    ("kind", "name", "examples"),
    [
        *((*each.split(":"), 1) for each in BY_DAY),
        *(
            pytest.param(record.kind, record.name, examples, marks=pytest.mark.nightly)
            for record in RECORDS
            for examples in (1, 2, 3)
        ),
    ],
)
def test_few_cases_blame_nobody(kind, name, examples):
    verdict = verify(selected(kind, name, {}), examples=examples)
    assert verdict.kept, [line for finding in verdict.of_status("broken") for line in (finding.promise, *finding.lines)]
