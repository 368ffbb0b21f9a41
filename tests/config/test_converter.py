"""The strict converter: what each type takes, what it refuses and in which words."""

import enum
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import pytest
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, in_, instance_of, le, lt, matches_re, max_len, min_len, optional

from skyrl_engine.config.converter import refusals, strict_converter


class Color(enum.Enum):
    RED = "red"
    TWO = 2


@frozen
class Term:
    use: str
    coef: float = 1.0


def mistakes(value: object, kind: Any) -> list[tuple[tuple[str | int, ...], str, str]]:
    """Key, cause and remedy of every mistake; a value that is taken is a failure of the test."""
    try:
        taken = strict_converter().structure(value, kind)
    except Exception as error:  # noqa: BLE001 -- refusals() is what is tested
        return [(path, refusal.cause, refusal.remedy) for path, refusal in refusals(error)]
    raise AssertionError(f"{value!r} was taken as {taken!r}")


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        (1, int, 1),
        (2, float, 2.0),
        (1e-6, float, 1e-6),
        (True, bool, True),
        ("1", str, "1"),
        ("x", Path, Path("x")),
        ("none", int | None, None),
        (None, int | None, None),
        (3, int | None, 3),
        ("none", str | None, None),
        ("none", str, "none"),
        ("none", Literal["none", "all"] | None, "none"),
        ("a", Literal["a", 1], "a"),
        (1, Literal["a", 1], 1),
        ("red", Color, Color.RED),
        (2, Color, Color.TWO),
        (2, float | int, 2),
        (2, int | float, 2),
        (0.5, int | float, 0.5),
        ("auto", float | Literal["auto"], "auto"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, 0.5], tuple[int, float], (1, 0.5)),
        ([], list[int], []),
        (["a"], Sequence[str], ("a",)),
        (["a", "a"], frozenset[str], frozenset("a")),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ({"a": {"use": "kl"}}, Mapping[str, Term], {"a": Term("kl")}),
        ([{"use": "kl", "coef": 2}], tuple[Term, ...], (Term("kl", 2.0),)),
        (3, Annotated[int, "samples"], 3),
        ({"deep": [1, "x"]}, Any, {"deep": [1, "x"]}),
        (["x", 1], list, ["x", 1]),
    ],
)
def test_values_that_are_taken(value: object, kind: Any, result: object) -> None:
    taken = strict_converter().structure(value, kind)
    assert taken == result
    assert type(taken) is type(result)


@pytest.mark.parametrize(
    ("value", "kind", "cause"),
    [
        ("1", int, 'must be a whole number, is "1"'),
        (True, int, "must be a whole number, is true"),
        (2.0, int, "must be a whole number, is 2.0"),
        (None, int, "must be a whole number, is nothing"),
        (1, bool, "must be true or false, is 1"),
        ("true", bool, 'must be true or false, is "true"'),
        (1, str, "must be text, is 1"),
        (False, str, "must be text, is false"),
        ("1e-6", float, 'must be a number, is "1e-6"'),
        (True, float, "must be a number, is true"),
        (math.inf, float, "must be a finite number, is inf"),
        (math.nan, float, "must be a finite number, is nan"),
        (10**400, float, "must be a finite number, is too large"),
        ("3", int | None, 'must be a whole number or none, is "3"'),
        (3, Path, "must be a path, is 3"),
        ("b", Literal["a", "c"], 'must be one of "a", "c", is "b"'),
        (True, Literal["a", 1], 'must be one of "a", 1, is true'),
        (1.0, Literal["a", 1], 'must be one of "a", 1, is 1.0'),
        ("blue", Color, 'must be one of "red", 2, is "blue"'),
        (2.0, Color, 'must be one of "red", 2, is 2.0'),
        (True, int | str, "must be a whole number or text, is true"),
        ("abc", tuple[str, ...], 'must be a list, is "abc"'),
        ({"a": 1}, list[str], "must be a list, is a table"),
        ([1], tuple[int, int], "must be a list of 2, has 1"),
        ([1], dict[str, int], "must be a table, is a list"),
        ("kl", Term, 'must be a table, is "kl"'),
        ([], Term, "must be a table, is a list"),
    ],
)
def test_nothing_is_coerced(value: object, kind: Any, cause: str) -> None:
    ((path, found, _),) = mistakes(value, kind)
    assert path == ()
    assert found == cause


@pytest.mark.parametrize(
    ("value", "kind", "remedy"),
    [
        (2.0, int, "Write 2"),
        ("2", int, "Write a whole number such as 8, without quotes and decimal point"),
        (7, str, "Put it in quotes"),
        ("incline", Literal["inline", "ray"], 'Did you mean "inline"?'),
        ("GPU", Literal["auto", "cpu", "cuda"], 'Did you mean "cuda"?'),
        ("bf16", Literal["float64", "float32", "bfloat16"], 'Did you mean "bfloat16"?'),
        ("x", Literal["inline", "ray"], "Choose one of them"),
    ],
)
def test_remedies(value: object, kind: Any, remedy: str) -> None:
    assert mistakes(value, kind)[0][2] == remedy


def test_every_mistake_of_nested_values_is_found_with_its_key() -> None:
    @frozen
    class Outer:
        terms: tuple[Term, ...]
        count: int
        names: Mapping[str, int] = attrs.Factory(dict)

    table = {"terms": [{"use": "kl"}, {"use": 1, "coef": "x"}, {}], "names": {"a": 1, "b": "2"}, "cuont": 1}
    assert sorted((path, cause) for path, cause, _ in mistakes(table, Outer)) == [
        (("count",), "is required"),
        (("cuont",), "is not a known key"),
        (("names", "b"), 'must be a whole number, is "2"'),
        (("terms", 1, "coef"), 'must be a number, is "x"'),
        (("terms", 1, "use"), "must be text, is 1"),
        (("terms", 2, "use"), "is required"),
    ]


def test_every_validator_speaks_in_plain_words() -> None:
    def whole(_instance: object, _attribute: object, value: int) -> None:
        if value % 2:
            raise ValueError("must be even.")

    @frozen
    class Checked:
        at_least: int = field(default=1, validator=ge(1))
        more: float = field(default=1.0, validator=[gt(0), lt(2)])
        at_most: int = field(default=1, validator=le(1))
        maybe: int | None = field(default=None, validator=optional(ge(1)))
        full: str = field(default="x", validator=min_len(1))
        long: str = field(default="xxx", validator=min_len(3))
        short: str = field(default="x", validator=max_len(2))
        choice: str = field(default="a", validator=in_(("alpha", "beta")))
        pattern: str = field(default="x", validator=matches_re("x+"))
        kind: Any = field(default="x", validator=instance_of(str))
        each: tuple[float, ...] = field(default=(), validator=deep_iterable(lt(1.0)))
        even: int = field(default=2, validator=whole)

    table = {
        "at_least": 0, "more": 2.5, "at_most": 2, "maybe": 0, "full": "", "long": "xx", "short": "xxx", "choice": "alhpa",
        "pattern": "y", "kind": 3, "each": [0.5, 1.5], "even": 3,
    }  # fmt: skip
    causes = {path: cause for path, cause, _ in mistakes(table, Checked)}
    assert causes[("at_least",)] == "must be at least 1, is 0"
    assert causes[("more",)] == "must be less than 2, is 2.5"
    assert causes[("at_most",)] == "must be at most 1, is 2"
    assert causes[("maybe",)] == "must be at least 1, is 0"
    assert causes[("full",)] == "must not be empty"
    assert causes[("long",)] == "must have a length of at least 3, has 2"
    assert causes[("short",)] == "must have a length of at most 2, has 3"
    assert causes[("choice",)] == 'must be one of "alpha", "beta", is "alhpa"'
    assert causes[("pattern",)].startswith("must match regex")
    assert "'kind' must be" not in causes[("kind",)]
    assert causes[("each",)] == "must be less than 1.0, is 1.5"
    assert causes[("even",)] == "must be even"
    assert len(causes) == len(table)


def test_a_validator_may_read_other_fields() -> None:
    @frozen
    class Range:
        low: float = 0.0
        high: float = field(default=1.0)

        @high.validator
        def _above_low(self, _attribute: object, value: float) -> None:
            if value <= self.low:
                raise ValueError(f"must be more than low = {self.low}")

    assert strict_converter().structure({"high": 2}, Range) == Range(0.0, 2.0)
    assert mistakes({"low": 3, "high": 2}, Range) == [(("high",), "must be more than low = 3.0", "Choose an allowed value")]
    assert mistakes({"high": -1}, Range) == [((), "must be more than low = 0.0", "Choose an allowed value")]
    assert [path for path, _, _ in mistakes({"low": "x", "high": -1}, Range)] == [("low",)]


def test_a_check_over_the_whole_table_names_the_table() -> None:
    @frozen
    class Pair:
        left: int | None = None
        right: int | None = None

        def __attrs_post_init__(self) -> None:
            if self.left is None and self.right is None:
                raise ValueError("give left or right")

    assert mistakes({}, Pair) == [((), "give left or right", "Choose an allowed value")]


def test_private_names_converters_and_computed_fields_of_a_schema() -> None:
    @frozen
    class Odd:
        _hidden: int = 1
        upper: str = field(default="x", converter=str.upper, validator=in_(("X", "Y")))
        made: int = field(init=False, default=5)

    assert strict_converter().structure({"hidden": 2, "upper": "y"}, Odd) == Odd(hidden=2, upper="y")
    assert mistakes({"made": 1}, Odd)[0][1] == "is not a known key"
    assert "must be one of" in mistakes({"upper": "z"}, Odd)[0][1]


def test_a_type_that_no_configuration_can_hold_is_the_schemas_mistake() -> None:
    @frozen
    class Strange:
        run: "type[int]" = int

    assert mistakes({"run": 1}, Strange)[0][1] == "has a type that no configuration can hold"


def test_unknown_keys_list_what_there_is() -> None:
    assert mistakes({"use": "x", "cof": 1}, Term) == [(("cof",), "is not a known key", 'Did you mean "coef"?')]
    assert mistakes({"use": "x", "zzz": 1}, Term) == [(("zzz",), "is not a known key", "The keys here are use, coef")]
