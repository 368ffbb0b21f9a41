"""TOML: what is refused and where, and the line of every key."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.config.reading.origins import leaves
from skyrl_engine.config.reading.toml import key_lines, read_toml
from skyrl_engine.config.report import to_toml
from skyrl_engine.errors import ConfigError

AWKWARD = """\
# [not.a.table] and key = 1 in a comment
title = "a # b = [c]"

[model]   # trailing
path = '''
[fake]
seed = 3
'''
"quoted.key" = 1
nested.deep.value = 2

[data]
train = [
  "x = 1",  # ]
  "]",
]
both = { first = 1, second = "}" }

[[loss.terms]]
use = "kl"
[loss.terms.options]
coef = 0.1
[[loss.terms]]
use = \"\"\"two quotes \\\"\\\"\\\" inside\"\"\"
"""


def test_lines_of_keys_are_found_around_strings_comments_and_brackets() -> None:
    table, lines = read_toml(AWKWARD, "x.toml")
    assert lines == {
        ("title",): 2,
        ("model",): 4,
        ("model", "path"): 5,
        ("model", "quoted.key"): 9,
        ("model", "nested"): 10,
        ("model", "nested", "deep"): 10,
        ("model", "nested", "deep", "value"): 10,
        ("data",): 12,
        ("data", "train"): 13,
        ("data", "both"): 17,
        ("loss", "terms", 0): 19,
        ("loss", "terms", 0, "use"): 20,
        ("loss", "terms", 0, "options"): 21,
        ("loss", "terms", 0, "options", "coef"): 22,
        ("loss", "terms", 1): 23,
        ("loss", "terms", 1, "use"): 24,
    }
    assert table["data"]["train"] == ["x = 1", "]"]


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("[a]\nx = 1\nx = 2\n", "x.toml:3:6", "a key is given twice"),
        ("[a]\nx = 1\n[a]\n", "x.toml:3:3", "a table is given twice"),
        ("x = {a = 1}\nx.b = 2\n", "x.toml:2:8", "a table that was written in braces is extended elsewhere"),
        ("path = runs/a\n", "x.toml:1:8", "a value is missing or is not TOML; text needs quotes"),
        ("[model\n", "x.toml:1:7", "is not TOML: expected ']' at the end of a table declaration"),
        ("x = [1,", "x.toml", "a value is missing or is not TOML; text needs quotes"),
    ],
)
def test_what_is_not_toml_is_refused_with_its_place(text: str, where: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_toml(text, "x.toml")
    (problem,) = caught.value.problems
    assert (problem.where, problem.cause) == (where, cause)


_words = st.text(st.characters(codec="utf-8"), max_size=8)
_scalars = st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False), _words)
_tables = st.recursive(
    st.dictionaries(_words, _scalars, max_size=3),
    lambda inner: st.dictionaries(
        _words, st.one_of(_scalars, inner, st.lists(inner, max_size=3), st.lists(_scalars, max_size=3)), max_size=4
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(_tables)
def test_every_leaf_has_a_line_and_every_line_a_key(table: dict[str, Any]) -> None:
    """On what tomli-w writes for any table. Keys inside braces have no line of their own; a key around them has."""
    text = to_toml(table)
    lines = key_lines(text)
    read, _ = read_toml(text, "x.toml")
    assert read == table
    for path in lines:
        value: Any = read
        for part in path:
            value = value[part]
    for path, _value in leaves(read):
        assert not path or any(path[:end] in lines for end in range(1, len(path) + 1)), path
