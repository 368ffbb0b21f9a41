"""docs/reference/losses.md names every loss and correction, each option with its default, and what each declares."""

import re
from pathlib import Path
from typing import Any

import pytest
from loss_oracles import CASES, random_batch
from test_distillation_losses import METRICS as OF_DISTILLATION
from test_preference_losses import batch as pairs
from test_preference_losses import run as preferences

from skyrl_engine.config.report import default_text, key_meanings
from skyrl_engine.contracts.kinds.loss import compares_pairs
from skyrl_engine_losses import plugin

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/losses.md").read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))
LOSSES = [name for name in plugin.__all__ if hasattr(getattr(plugin, name), "skyrl_engine_make_loss")]


def schema_of(name: str) -> Any:
    return getattr(plugin, name).skyrl_engine_config_schema()


def test_the_page_has_exactly_these_sections() -> None:
    assert sorted(SECTIONS) == sorted(plugin.__all__)
    assert "Losses: reference/losses.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("name", plugin.__all__)
def test_every_option_stands_there_with_its_default(name: str) -> None:
    schema = schema_of(name)
    fields = () if schema is None else schema.__attrs_attrs__
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", SECTIONS[name], re.MULTILINE)
    assert rows == [(field.name, default_text(field)) for field in fields]


@pytest.mark.parametrize("name", plugin.__all__)
def test_every_option_explains_itself(name: str) -> None:
    """`skyrl-engine plugins show` prints the text under each field."""
    schema = schema_of(name)
    assert schema is None or set(key_meanings(schema)) == {field.name for field in schema.__attrs_attrs__}


def declared(name: str) -> Any:
    schema = schema_of(name)
    return getattr(plugin, name).skyrl_engine_make_loss(None if schema is None else schema())


@pytest.mark.parametrize("name", LOSSES)
def test_every_declaration_stands_there(name: str) -> None:
    declaration, section = declared(name), SECTIONS[name]
    (needs,) = re.findall(r"^- Needs (.+?)\. Homogeneous", section, re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r"`([\w:.\[\]]+)`", re.sub(r"\(with .+?\)", "", needs))) == declaration.needs
    assert ("Homogeneous: yes" in section) is declaration.homogeneous
    assert ("Homogeneous: no" in section) is not declaration.homogeneous
    assert ("Local to the batch: yes" in section) is declaration.batch_local
    assert ("Local to the batch: no" in section) is not declaration.batch_local
    assert re.findall(r"Only the reducer `(\w+)`", section) == list(declaration.reducers or ())
    assert ("Compares pairs: yes" in section) is compares_pairs(declaration)
    advised = re.findall(r"Advised reducer: `(\w+)`", section)
    assert advised == list(declaration.advised_reducers or ())


@pytest.mark.parametrize("name", LOSSES)
def test_every_metric_stands_there(name: str) -> None:
    case = next((case for case in CASES if case.name == name), None)
    if name in OF_DISTILLATION:
        metrics = OF_DISTILLATION[name]()
    else:
        metrics = (
            preferences(name, None if schema_of(name) is None else schema_of(name)(), pairs(0)).metrics
            if case is None
            else case.run(random_batch(0))[0].metrics
        )
    paragraphs = re.findall(r"^- Metrics? (.+(?:\n  .+)*)$", SECTIONS[name], re.MULTILINE)
    assert sorted(re.findall(r"`([\w/]+)`", " ".join(paragraphs))) == sorted(metrics)
