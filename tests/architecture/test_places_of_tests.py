"""Tests are where the modules are that they test: a folder under tests/ names a package of the engine, in that direction only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ACROSS = {
    "architecture",
    "benchmarks",
    "integration",
    "meta",
    "migration",
    "mutation",
    "outsider",
    "running",
    "screenshots",
    "startup",
}
"""Folders of tests that are about no single package."""


def list_reasons(file: Path, tests: Path, engine: Path) -> Iterator[str]:
    """Say why a test file is in the wrong folder."""
    folder = file.parent.relative_to(tests)
    if folder.parts[:1] and folder.parts[0] in ACROSS:
        return
    home = engine / folder
    if not home.is_dir() and not home.with_suffix(".py").is_file():
        yield f"{file.relative_to(tests)}: skyrl_engine has no {folder.as_posix()}"
        return
    named = file.name.removeprefix("test_")
    below = [path.parent.relative_to(engine).as_posix() for path in home.rglob(named) if path.parent != home]
    if below and not (home / named).is_file():
        yield f"{file.relative_to(tests)}: the module of this name lies in {below[0]}"


def test_every_test_lies_where_its_module_lies(engine: Path) -> None:
    files = list(TESTS.rglob("test_*.py"))
    assert len(files) > 100
    assert [why for file in files for why in list_reasons(file, TESTS, engine)] == []


def test_the_exceptions_are_there() -> None:
    assert {folder.name for folder in TESTS.iterdir() if folder.is_dir()} >= ACROSS


@pytest.mark.parametrize(
    ("place", "right"),
    [
        ("contracts/values/test_columns.py", True),
        ("contracts/values/test_corners.py", True),
        ("integration/test_anything.py", True),
        ("contracts/test_columns.py", False),
        ("contract/test_anything.py", False),
        ("test_anything.py", True),
    ],
)
def test_a_misplaced_test_would_be_seen(engine: Path, place: str, right: bool) -> None:
    assert (not list(list_reasons(TESTS / place, TESTS, engine))) == right
