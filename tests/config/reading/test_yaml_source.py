"""YAML by the core schema of 1.2: numbers, text, and what is refused."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.config.reading.yaml import read_yaml
from skyrl_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.5e+3", -500.0),
        ("1.5", 1.5),
        ("12", 12),
        ("+12", 12),
        ("010", 10),
        ("0o17", 15),
        ("0xfF", 255),
        ("-.inf", -math.inf),
        (".Inf", math.inf),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("inf", "inf"),
        ("none", "none"),
        ("1e", "1e"),
        ("'1'", "1"),
        ('"true"', "true"),
    ],
)
def test_plain_scalars_follow_the_core_schema(written: str, value: object) -> None:
    table, _ = read_yaml(f"key: {written}\n", "x.yaml")
    assert table == {"key": value}
    assert type(table["key"]) is type(value)


def test_not_a_number_is_read() -> None:
    assert math.isnan(read_yaml("key: .nan", "x.yaml")[0]["key"])


def test_lines_of_keys_and_list_items() -> None:
    table, lines = read_yaml("model:\n  path: m\nloss:\n  terms:\n    - use: kl\n    - {use: x, coef: 1e-3}\n", "x.yaml")
    assert table["loss"]["terms"][1] == {"use": "x", "coef": 1e-3}
    assert lines[("model", "path")] == 2
    assert lines[("loss", "terms", 0, "use")] == 5
    assert lines[("loss", "terms", 1, "coef")] == 6


def test_merge_keys_add_what_the_table_does_not_say_itself() -> None:
    table, lines = read_yaml("base: &base\n  a: 1\n  b: 2\nother:\n  b: 3\n  <<: *base\n", "x.yaml")
    assert table["other"] == {"a": 1, "b": 3}
    assert lines[("other", "b")] == 5
    assert lines[("other", "a")] == 2


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3:1", "the key 'a' is given twice, first on line 1"),
        ("t:\n  a: 1\n  'a': 2\n", "x.yaml:3:3", "the key 'a' is given twice, first on line 2"),
        ("1: x\n", "x.yaml:1:1", "the key 1 is not text"),
        ("? [a]\n: x\n", "x.yaml:1:3", "the key a list or table is not text"),
        (
            "a: !!python/object/apply:os.system [x]\n",
            "x.yaml:1:4",
            "the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not read",
        ),
        ("a: !!timestamp 2024-01-01\n", "x.yaml:1:4", "the tag 'tag:yaml.org,2002:timestamp' is not read"),
        ("a: &x [*x]\n", "x.yaml:1:4", "an alias refers to the table it stands in"),
        ("- a\n- b\n", "x.yaml", "holds no tables"),
        ("just text\n", "x.yaml", "holds no tables"),
    ],
)
def test_what_a_configuration_cannot_hold_is_refused_with_its_place(text: str, where: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "x.yaml")
    (problem,) = caught.value.problems
    assert (problem.where, problem.cause) == (where, cause)


@pytest.mark.parametrize(
    "text", ["a: [1\n", "a: 1\n b: 2\n", "---\na: 1\n---\nb: 2\n", "a: *missing\n", "a: !!int x\n", "a: \x00\n", "<<: 3\n"]
)
def test_broken_yaml_is_a_configuration_mistake(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "x.yaml")
    assert caught.value.problems[0].where.startswith("x.yaml")


def test_every_repeated_key_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml("a: 1\na: 2\nb: {c: 1, c: 2}\n", "x.yaml")
    assert [problem.where for problem in caught.value.problems] == ["x.yaml:2:1", "x.yaml:3:11"]


def test_an_empty_file_holds_nothing() -> None:
    assert read_yaml("# nothing\n", "x.yaml") == ({}, {})


_words = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), _words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_words, inner, max_size=3)),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.dictionaries(_words, _values, max_size=4))
def test_json_is_yaml(table: dict[str, Any]) -> None:
    """YAML 1.2 contains JSON: numbers such as 1e-07, escapes and nesting are read as JSON reads them."""
    assert read_yaml(json.dumps(table), "x.yaml")[0] == table
