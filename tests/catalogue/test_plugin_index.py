"""An index is read strictly: every field wrong once, and what is no index at all."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from small_wheels import index_of

from skyrl_engine.catalogue.plugin_index import (
    IndexedDistribution,
    IndexedPlugin,
    IndexedWheel,
    PluginIndex,
    read_index,
)
from skyrl_engine.errors import PluginIndexError

PLACES: dict[type, tuple[Any, ...]] = {
    PluginIndex: (),
    IndexedDistribution: ("distributions", 0),
    IndexedWheel: ("distributions", 0, "wheels", 0),
    IndexedPlugin: ("distributions", 0, "wheels", 0, "plugins", 0),
}
"""The classes of the schema, and where the first table of each is."""

LONG = "x" * 501
WRONG: dict[type, dict[str, list[Any]]] = {
    PluginIndex: {"format": [2, "1", None, 1.0, True], "distributions": [{}, "x", None, [[]]]},
    IndexedDistribution: {
        "name": ["Acme", "a_b", "../a", "-a", "a-", "", "a" * 101, None, "acme-other"],
        "wheels": [[], None, "x", {}],
    },
    IndexedWheel: {
        "version": ["x", "", "0.2.0", 1, "1.0\n"],
        "file": [
            "../acme_tiny-0.1.0-py3-none-any.whl",
            "sub/acme_tiny-0.1.0-py3-none-any.whl",
            "/etc/passwd",
            "https://acme.example/acme_tiny-0.1.0-py3-none-any.whl",
            "..\\acme_tiny-0.1.0-py3-none-any.whl",
            "acme_other-0.1.0-py3-none-any.whl",
            "acme_tiny-0.2.0-py3-none-any.whl",
            "acme_tiny.whl",
            "acme_tiny-0.1.0.tar.gz",
            "-r acme_tiny-0.1.0-py3-none-any.whl",
            "acme_tiny-0.1.0-py3-none-any.whl\n",
            "",
            3,
        ],
        "sha256": ["0" * 63, "0" * 65, "A" * 64, "g" * 64, "", "0" * 64 + "\n", None],
        "size": [0, -1, 2**30 + 1, 10**30, 1.5, "2", True],
        "engine": ["new", "", 3],
        "python": ["three", "", 3],
        "date": ["yesterday", "2026-1-1", "2026-99-01", "", 20260101],
        "plugins": [{}, "x", None],
        "requires_engine": ["0.3", ">=x", LONG, None],
        "requires_python": ["3", "python", LONG, None],
        "summary": [LONG, None, []],
        "license": [LONG, None],
        "homepage": ["javascript:alert(1)", "file:///etc/passwd", "https://a b", "https://a/<script>", f"https://{LONG}", None],
        "problem": [LONG, 1, []],
    },
    IndexedPlugin: {
        "kind": ["looss", "", None, "../loss"],
        "name": ["", "a b", "a:b", "a\n", LONG, None],
        "status": ["verified", "", None, True],
        "kept": [-1, 10_001, "3", 2.0, None],
        "broken": ["x", [LONG], ["x"] * 201, None, [1]],
        "reason": [LONG, None],
        "options": ["x", [LONG], ["x"] * 101, None, [{}]],
    },
}


CASES = [(schema, name, value) for schema, fields in WRONG.items() for name, values in fields.items() for value in values]


def spoil(index: dict[str, Any], schema: type) -> dict[str, Any]:
    """Return the first table of a class of the schema."""
    table: Any = index
    for step in PLACES[schema]:
        table = table[step]
    return table


@pytest.fixture
def index(tiny: Path) -> dict[str, Any]:
    return json.loads(index_of(tiny).to_json())


def test_every_field_of_the_schema_is_attacked() -> None:
    assert {schema: set(fields) for schema, fields in WRONG.items()} == {
        schema: {attribute.name for attribute in attrs.fields(schema)} for schema in PLACES
    }


def test_what_is_written_is_read_again(tiny: Path) -> None:
    made = index_of(tiny)
    assert read_index(made.to_json().encode(), "here") == made
    assert made.find("acme-tiny") is made.distributions[0]
    assert made.distributions[0].newest.standing == "verified"


@pytest.mark.parametrize(("schema", "name", "value"), CASES, ids=lambda part: getattr(part, "__name__", None) or repr(part)[:30])
def test_a_field_with_a_wrong_value_is_refused(index: dict[str, Any], schema: type, name: str, value: Any) -> None:
    spoil(index, schema)[name] = value
    with pytest.raises(PluginIndexError) as caught:
        read_index(json.dumps(index).encode(), "the index here")
    assert caught.value.exit_code == 3
    assert str(caught.value).rpartition("\n")[2].startswith("the index here is ")
    if name != "format" and value != "acme-other":
        assert name in str(caught.value) or "is not named after" in str(caught.value)


@pytest.mark.parametrize("schema", PLACES)
def test_a_key_that_is_not_of_the_format_is_refused(index: dict[str, Any], schema: type) -> None:
    spoil(index, schema)["post_install"] = "rm"
    with pytest.raises(PluginIndexError, match="post_install"):
        read_index(json.dumps(index).encode(), "here")


@pytest.mark.parametrize("schema", PLACES)
def test_a_field_that_is_required_is_missed(index: dict[str, Any], schema: type) -> None:
    for attribute in attrs.fields(schema):
        if attribute.default is attrs.NOTHING or attribute.name == "format":
            without = json.loads(json.dumps(index))
            del spoil(without, schema)[attribute.name]
            with pytest.raises(PluginIndexError):
                read_index(json.dumps(without).encode(), "here")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"<!DOCTYPE html><title>404</title>", "is a page of HTML"),
        (b" \n<html>", "is a page of HTML"),
        (b"", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"format": 1, "format": 1, "distributions": []}', "a key twice"),
        (b"[]", "no index of plugins"),
        (b'{"releases": {}}', "no index of plugins"),
        (b'{"format": 2, "distributions": []}', "format 2, and this engine reads format 1"),
    ],
)
def test_what_is_no_index_is_said(text: bytes, words: str) -> None:
    with pytest.raises(PluginIndexError, match=words):
        read_index(text, "here")


def test_a_distribution_that_stands_in_it_twice_is_refused(index: dict[str, Any]) -> None:
    index["distributions"] *= 2
    with pytest.raises(PluginIndexError, match="acme-tiny stands in it twice"):
        read_index(json.dumps(index).encode(), "here")


@pytest.mark.parametrize(
    ("statuses", "problem", "standing"),
    [
        (["kept", "kept"], None, "verified"),
        (["kept", "unchecked"], None, "partly verified"),
        (["kept", "unchecked", "broken"], None, "broken"),
        (["unchecked"], None, "not verified"),
        ([], None, "not verified"),
        (["kept"], "it cannot be installed", "broken"),
    ],
)
def test_one_word_stands_for_all_plugins_of_a_wheel(tiny: Path, statuses: list[Any], problem: str | None, standing: str) -> None:
    plugins = tuple(IndexedPlugin("loss", f"l{number}", status, reason="so") for number, status in enumerate(statuses))
    wheel = index_of(tiny, plugins=plugins, problem=problem).distributions[0].newest
    assert wheel.standing == standing
    assert bool(list(wheel.list_reasons())) == (standing != "verified")
