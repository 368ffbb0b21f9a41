"""A format is one row of a table: what reads rows, what warns of columns, and the pages follow from it."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from skyrl_engine.config.schema import DataFormat, KnownFormat
from skyrl_engine.data.dataset import _READ_BY
from skyrl_engine.data.sources.formats import FORMATS, Format, detect, list_known_columns, to_examples
from skyrl_engine.data.sources.rows import Row
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.errors import DataError

PAGES = Path(__file__).parents[3] / "docs" / "how-to"


def rows_of_page() -> dict[str, str]:
    """The rows of the page's table of formats, by the formats that their first cell names."""
    text = (PAGES / "bring-your-data.md").read_text(encoding="utf-8").partition("## What a row looks like")[2]
    table = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {name: line.split("|", 2)[2] for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_a_row_of_the_table_is_all_that_a_format_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from its name, which the configuration checks."""

    def read(row: Row, _rule: Any) -> list[tuple[PlainText, None]]:
        return [(PlainText(row.values["haiku"].replace("/", "\n")), None)]

    name: Any = "haiku"
    monkeypatch.setitem(
        FORMATS, name, Format(name, "sample", read, needs=(("haiku", "poem"),), further=("season",), is_answer=False)
    )
    row = Row(0, "line 1", {"haiku": "old pond/a frog/splash", "season": "spring", "id": 1})
    assert detect("auto", row) == "haiku"
    ((example, role),) = to_examples(row, name, has_template=True, rating=None)
    assert example == PlainText("old pond\na frog\nsplash")
    assert role is None
    assert "season" in list_known_columns("messages")
    with pytest.raises(DataError, match="no column 'haiku' or 'poem', which format 'haiku' needs"):
        to_examples(Row(0, "line 2", {"verse": ""}), name, has_template=True, rating=None)
    with pytest.raises(DataError) as caught:
        detect("auto", Row(0, "here", {"x": 1}))
    assert "format haiku needs haiku or poem" in caught.value.details


def test_the_configuration_names_the_formats_of_the_table() -> None:
    assert tuple(FORMATS) == get_args(KnownFormat)
    assert get_args(DataFormat) == ("auto", *FORMATS)


def test_the_page_lists_the_formats_in_the_order_in_which_they_are_tried() -> None:
    assert list(rows_of_page()) == list(FORMATS)


@pytest.mark.parametrize("row", [row for row in FORMATS.values() if row.gives == "sample"], ids=lambda row: row.name)
def test_the_page_names_the_columns_of_every_format_of_samples(row: Format) -> None:
    named = set(re.findall(r"`(\w+)`", rows_of_page()[row.name]))
    needed = {column for groups in (row.needs, *row.also) for group in groups for column in group}
    assert needed <= named
    assert named <= row.columns


@pytest.mark.parametrize("row", [row for row in FORMATS.values() if row.gives != "sample"], ids=lambda row: row.name)
def test_the_page_of_preferences_names_the_columns_of_every_format_of_theirs(row: Format) -> None:
    text = (PAGES / "train-on-preferences.md").read_text(encoding="utf-8").partition("## What a row looks like")[2]
    named = set(re.findall(r"`(\w+)`", text.partition("\n## ")[0]))
    assert {column for groups in (row.needs, *row.also) for group in groups for column in group} <= named


def test_who_reads_a_column_is_said_of_columns_that_some_format_knows() -> None:
    assert set(_READ_BY) <= list_known_columns("messages")
