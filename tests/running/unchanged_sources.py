"""Tests of tests, marked `of_sources("folder", "file", ...)`: run again when one of those has changed since they passed.

What passed with which sources is kept under .cache, and what passed in `nox -s meta` in passed.txt next to this file, for fresh clones and
other machines. `nox -s meta` runs this file as a program: with `forget` before its tests, so that nothing from earlier runs gets into the
list, and with `write` after all of them have passed.

A change to the kit makes all of them due. So `nox -s tests` and `nox -s proofs` pass `--by-day`, and of what is due they run a fixed
fifth of each file; `nox -s meta` runs the others. Of the kit's promises about each plugin, marked `conformance`, they run a fifth too;
`nox -s nightly` runs the others, and `nox -s tests -- plugins/NAME` all of one plugin.
"""

import hashlib
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SAMPLED = 5
"""One of so many tests of a file is in the sample."""

RECORD = pytest.StashKey[Path]()
KEPT = Path(".cache") / "unchanged-sources"
PASSED = Path("tests") / "running" / "passed.txt"
"""One line per test: hash of its name, hash of the sources that it passed with."""


def fingerprint(root: Path, places: Iterable[str]) -> str:
    """Hash of the sources in these files and folders, by path and content."""
    state = hashlib.sha256()
    for place in sorted(places):
        found = [root / place] if (root / place).is_file() else sorted((root / place).rglob("*"))
        files = [path for path in found if path.suffix in {".py", ".c", ".h", ".toml"}]
        assert files, f"of_sources names {place}, which holds no sources"
        for path in files:
            state.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


class UnchangedSources:
    """Leaves out what passed with these sources, and keeps what passes."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._known: dict[tuple[str, ...], str] = {}
        own = config.rootpath / PASSED
        self._passed = frozenset(own.read_text().split()) if own.exists() else frozenset()

    def _record(self, item: pytest.Item) -> Path | None:
        mark = item.get_closest_marker("of_sources")
        if mark is None:
            return None
        places = (item.nodeid.partition("::")[0], *mark.args)
        if places not in self._known:
            self._known[places] = fingerprint(self._root, places)
        return self._root / KEPT / f"{hash_name(item)}-{self._known[places][:20]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        records = {item: record for item in items if (record := self._record(item)) is not None}
        resting = set()
        for item, record in records.items():
            item.stash[RECORD] = record
            if (record.exists() or record.name in self._passed) and not config.getoption("every_source"):
                resting.add(item)
        if config.getoption("by_day"):
            many = {item for item in items if item in records or item.get_closest_marker("conformance") is not None}
            resting |= many - choose_sample(many)
        if resting:
            config.hook.pytest_deselected(items=[item for item in items if item in resting])
            items[:] = [item for item in items if item not in resting]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        record = item.stash.get(RECORD, None)
        if report.failed and record is not None:
            record.unlink(missing_ok=True)
        elif report.when == "call" and report.passed and record is not None:
            record.parent.mkdir(parents=True, exist_ok=True)
            for older in record.parent.glob(f"{record.name.partition('-')[0]}-*"):
                older.unlink()
            record.touch()
        return report


def choose_sample(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return a fifth of each file's tests, rounded up: the same ones whatever is due, since their names' hashes decide."""
    by_file: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=hash_name):
        if item.get_closest_marker("nightly") is None:
            by_file[item.path].append(item)
    return {item for own in by_file.values() for item in own[: -(-len(own) // SAMPLED)]}


def hash_name(item: pytest.Item) -> str:
    """Return 20 hexadecimal digits of a test's name."""
    return hashlib.sha256(item.nodeid.encode()).hexdigest()[:20]


def forget(root: Path) -> None:
    """Remove what is kept of runs on this machine."""
    shutil.rmtree(root / KEPT, ignore_errors=True)


def write_passed(root: Path) -> int:
    """Write the list of what has passed since `forget`; return the number of its tests."""
    names = sorted(record.name for record in (root / KEPT).glob("*-*"))
    (root / PASSED).parent.mkdir(parents=True, exist_ok=True)
    (root / PASSED).write_text("".join(f"{name}\n" for name in names))
    return len(names)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-source", action="store_true", help="run tests marked of_sources whether their sources changed or not")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(UnchangedSources(config))


if __name__ == "__main__":
    here = Path(__file__).parents[2]
    if sys.argv[1:] == ["forget"]:
        forget(here)
    elif sys.argv[1:] == ["write"]:
        print(f"{PASSED}: {write_passed(here)} tests rest until their sources change")
    else:
        sys.exit("unchanged_sources.py forget|write, which `nox -s meta` calls")
