"""TOML written out, and the reference page."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import Factory, field, frozen

from skyrl_engine.config.reading.toml import read_toml
from skyrl_engine.config.report import configuration_reference, default_text, key_kind, key_meanings, to_toml
from skyrl_engine.config.sections import sections

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
_TABLES = [section.schema for section in sections().values() if attrs.has(section.schema)]


def test_the_reference_page_is_up_to_date() -> None:
    """After a change of the schema: python -m skyrl_engine.config.report > docs/reference/configuration.md"""
    assert PAGE.read_text(encoding="utf-8") == configuration_reference()


@pytest.mark.parametrize("schema", _TABLES, ids=lambda schema: schema.__name__)
def test_every_key_has_a_meaning(schema: type[Any]) -> None:
    meanings = key_meanings(schema)
    # PluginTable.options is no key: it holds the rest of the table.
    without = {name for name in attrs.fields_dict(schema) if not meanings.get(name)} - {"options"}
    assert without == set()


def test_a_text_without_value_is_written_as_none() -> None:
    text = to_toml({"a": None, "b": {"c": [None, 1]}})
    assert read_toml(text, "x.toml")[0] == {"a": "none", "b": {"c": ["none", 1]}}


def test_defaults_and_types_in_words() -> None:
    @frozen
    class Options:
        needed: int
        nothing: float | None = None
        words: tuple[str, ...] = ("a", "b")
        table: dict[str, int] = Factory(dict)
        later: int = field(default=Factory(lambda self: self.needed, takes_self=True))
        flag: bool = False

    fields = attrs.fields(Options)
    assert [default_text(attribute) for attribute in fields] == ["required", "none", '["a", "b"]', "{}", "computed", "false"]
    assert [key_kind(attribute.type) for attribute in fields] == [
        "a whole number", "a number or none", "a list (each: text)", "a table (each: a whole number)", "a whole number", "true or false",
    ]  # fmt: skip


def test_a_class_without_source_has_no_meanings() -> None:
    assert key_meanings(attrs.make_class("Made", ["x"])) == {}
