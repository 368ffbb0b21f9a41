"""docs/reference/advantages.md names every estimator with what it needs, and each option with its default."""

import re
from pathlib import Path

import pytest

from skyrl_engine.config.report import default_text
from skyrl_engine_advantages import plugin

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/advantages.md").read_text()
FORMULAS, OPTIONS = (
    re.findall(rf"^## {name}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)[0] for name in ("Formulas", "Options")
)
ESTIMATORS = sorted(name for name, value in vars(plugin).items() if hasattr(value, "skyrl_engine_make_advantage"))


def test_the_page_has_exactly_these_estimators() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (.*?) ?\| (.*?) ?\|$", FORMULAS, re.MULTILINE)
    declared = []
    for name in ESTIMATORS:
        factory = getattr(plugin, name)
        product = factory.skyrl_engine_make_advantage(config=factory.skyrl_engine_config_schema()())
        needs = ", ".join(f"`{need}`" for need in product.needs)
        declared.append((name, needs, "needed" if product.claims.groups == "needed" else ""))
    assert sorted(rows) == declared
    assert "Advantages: reference/advantages.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_option_stands_there_with_its_default(name: str) -> None:
    of_page = {
        option: default
        for option, owners, default in re.findall(r"^\| `(\w+)` \| (.+?) \| `(.+?)` \| .+ \|$", OPTIONS, re.MULTILINE)
        if owners == "all" or f"`{name}`" in owners
    }
    schema = getattr(plugin, name).skyrl_engine_config_schema()
    assert of_page == {attribute.name: default_text(attribute) for attribute in schema.__attrs_attrs__}
