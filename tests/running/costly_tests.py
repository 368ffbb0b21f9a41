"""Tests that cost seconds each, and how many cases of them a day's run has.

`costly_tests.txt` lists them: a number and a test. `nox -s tests` and `nox -s proofs` pass `--by-day`, and of the cases of a listed test they
run that many, the first ones. The others are marked `costly`: `nox -s nightly` runs them, and so does whoever names their file, as in
`nox -s tests -- plugins/megatron`. A test without cases has 0 or is not listed.
"""

from collections import Counter
from pathlib import Path

import pytest

LIST = Path("tests") / "running" / "costly_tests.txt"


def read_list(path: Path) -> dict[str, int]:
    """Return how many cases run by day, by the name of the test without its parameters; nothing where there is no list."""
    if not path.exists():
        return {}
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return {name: int(count) for count, name in lines}


class CostlyTests:
    """Marks the cases of listed tests beyond those of a day, and leaves them out of a day's run."""

    def __init__(self, cases_by_day: dict[str, int]) -> None:
        self._cases_by_day = cases_by_day
        self._seen: Counter[str] = Counter()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        name = item.nodeid.partition("[")[0]
        if name not in self._cases_by_day or item.get_closest_marker("nightly") is not None:
            return
        self._seen[name] += 1
        if self._seen[name] > self._cases_by_day[name]:
            item.add_marker("costly")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        costly = [item for item in items if item.get_closest_marker("costly") is not None]
        if costly and config.getoption("by_day"):
            config.hook.pytest_deselected(items=costly)
            items[:] = [item for item in items if item.get_closest_marker("costly") is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--by-day",
        action="store_true",
        help="leave costly cases for the night; of tests of tests that are due, and of promises, run a fixed fifth of each file",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CostlyTests(read_list(config.rootpath / LIST)))
