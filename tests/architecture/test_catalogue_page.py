"""The catalogue in the docs, which `nox -s catalogue` makes, has every distribution of the repository, with its badge and its page."""

import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "docs" / "reference" / "catalogue"
NAMES = sorted(
    tomllib.loads(path.read_text())["project"]["name"] for path in (ROOT / "pyproject.toml", *ROOT.glob("[!.]*/*/pyproject.toml"))
)
REMEDY = "run `nox -s catalogue`"


def test_the_page_lists_every_distribution() -> None:
    page = CATALOGUE.with_suffix(".md").read_text()
    assert re.findall(r"^\| \[(.+)\]\(catalogue/\1\.md\) \| !\[.+\]\(catalogue/\1\.svg\) \|", page, re.MULTILINE) == NAMES, REMEDY


def test_each_has_its_page_and_its_badge_and_no_other_has() -> None:
    assert sorted(path.name for path in CATALOGUE.iterdir()) == sorted(
        f"{name}{suffix}" for name in NAMES for suffix in (".md", ".svg")
    ), REMEDY
    for name in NAMES:
        assert (CATALOGUE / f"{name}.md").read_text().startswith(f"# {name}\n")
        assert str(ET.parse(CATALOGUE / f"{name}.svg").getroot().get("aria-label")).startswith(f"{name} ")


def test_no_page_names_a_place_on_a_machine() -> None:
    assert [
        path.name for path in CATALOGUE.iterdir() if re.search(r"(?<![\w.])/(tmp|home|root|work|Users)/", path.read_text())
    ] == []


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in NAMES if f"reference/catalogue/{name}.md" not in nav] == []
