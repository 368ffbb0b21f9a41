"""Distributions: each has tests in the short list that every Python is tried with, and gives away its sources without its tests."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_distribution_has_tests_in_the_short_list() -> None:
    places = [Path(line) for line in (ROOT / "tests" / "running" / "every_distribution.txt").read_text().split()]
    assert [str(place) for place in places if not (ROOT / place).exists()] == []
    projects = {path.parent.relative_to(ROOT) for path in ROOT.glob("[!.]*/*/pyproject.toml")}
    assert {project for project in projects if not any(place.is_relative_to(project) for place in places)} == set()


def test_a_source_distribution_has_what_it_names_and_no_tests() -> None:
    for project in sorted(ROOT.glob("[!.]*/*/pyproject.toml")):
        table = tomllib.loads(project.read_text(encoding="utf-8"))
        included = table["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
        assert {"src", "README.md", "CHANGELOG.md"} <= set(included), project
        assert not [name for name in included if "test" in name or not (project.parent / name).exists()], project
