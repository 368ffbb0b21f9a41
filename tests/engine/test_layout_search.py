"""docs/reference/layouts.md is what `tests/benchmarks/layouts_of_models.py` makes."""

from pathlib import Path

import pytest
from layouts_of_models import INTRODUCTION, MACHINES, list_models, make_page, make_row

PAGE = Path(__file__).parents[2] / "docs/reference/layouts.md"


def test_the_page_has_every_model_and_its_source() -> None:
    text, models = PAGE.read_text(), list_models()
    assert text.startswith(INTRODUCTION)
    for model in models:
        assert text.count(f"| {model['name']} | ") == 2
        assert f"| {model['name']} | {model['source']} | {model['date']} |" in text


def test_a_row_of_the_page_is_what_is_found() -> None:
    """One model on one machine, so that a change of the search or of the arithmetic shows here: then make the page again."""
    machine = MACHINES.index(next(each for each in MACHINES if each.ranks == 8))
    model = next(each for each in list_models() if each["name"] == "Llama-3.1-8B")
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith("| Llama-3.1-8B |"))
    cells = line.strip("| ").split(" | ")
    assert make_row(model, MACHINES[machine : machine + 1]) == [*cells[:2], cells[2 + machine]]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_page_is_what_its_program_makes() -> None:
    assert PAGE.read_text() == make_page()
