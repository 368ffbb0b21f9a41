"""JSON Schema of configurations: valid itself, and of one mind with the loader."""

import enum
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from attrs import Factory, field, frozen
from attrs.validators import ge, gt, min_len, optional

from skyrl_engine.config import config_schema
from skyrl_engine.config.json_schema import table_schema
from skyrl_engine.config.reading.sources import from_dict
from skyrl_engine.config.structure import structure

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "d"}}


def validator() -> jsonschema.Draft202012Validator:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"loss": {"use": "focal", "gamma": 2}, "observers": {"metrics_jsonl": {"every": 1}}},
        {"optimizer": {"max_grad_norm": "none", "betas": [0.5, 0.9]}, "checkpoint": {"keep": None}},
        {"plugins": {"block": ["a"], "pin": {"loss:ppo": "acme"}}, "training": {"steps": 3}},
        {"loss": {"terms": [{"use": "kl", "coef": 1, "estimator": "k1"}], "corrections": [{"use": "tis", "high": 2}]}},
    ],
)
def test_what_the_loader_takes_the_schema_takes(tables: dict[str, Any]) -> None:
    assert structure(from_dict({**MINIMAL, **tables}, "x")).problems == ()
    validator().validate({**MINIMAL, **tables})


@pytest.mark.parametrize(
    "tables",
    [
        {"model": {}},
        {"modle": {}},
        {"run": {"sed": 1}},
        {"run": {"seed": "1"}},
        {"run": {"seed": -1}},
        {"run": {"launch": "rya"}},
        {"data": {"train": ""}},
        {"data": {"train": "d", "eval_fraction": 1.0}},
        {"training": {"steps": 0}},
        {"training": {"epochs": 0}},
        {"optimizer": {"betas": [0.5]}},
        {"optimizer": {"max_grad_norm": "nothing"}},
        {"plugins": {"pin": {"loss:ppo": 1}}},
        {"loss": {"use": 3}},
        {"loss": "focal"},
        {"loss": {"terms": [{"use": "kl"}]}},
        {"loss": {"terms": [{"coef": 1.0}]}},
        {"loss": {"terms": {"use": "kl", "coef": 1}}},
        {"loss": {"corrections": ["tis"]}},
    ],
)
def test_what_the_loader_refuses_the_schema_refuses(tables: dict[str, Any]) -> None:
    assert structure(from_dict({**MINIMAL, **tables}, "x")).problems != ()
    assert not validator().is_valid({**MINIMAL, **tables})


class Color(enum.Enum):
    RED = "red"


@frozen
class Inner:
    use: str


@frozen
class Everything:
    terms: tuple[Inner, ...]
    _hidden: Annotated[int, "tokens"] = field(default=1, validator=[ge(1)])
    rate: float | None = field(default=None, validator=optional(gt(0)))
    mode: Literal["a", 1] = "a"
    color: Color = Color.RED
    names: Mapping[str, int] = Factory(dict)
    text: str = field(default="x", validator=min_len(1))
    anything: Any = None
    made: int = field(init=False, default=3)


def test_every_type_a_schema_may_use() -> None:
    schema = table_schema(Everything)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema == {
        "type": "object",
        "additionalProperties": False,
        "required": ["terms"],
        "properties": {
            "terms": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"use": {"type": "string"}},
                    "additionalProperties": False,
                    "required": ["use"],
                },
            },
            "hidden": {"type": "integer", "minimum": 1, "default": 1},
            "rate": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}, {"const": "none"}], "default": None},
            "mode": {"enum": ["a", 1], "default": "a"},
            "color": {"enum": ["red"], "default": "red"},
            "names": {"type": "object", "additionalProperties": {"type": "integer"}, "default": {}},
            "text": {"type": "string", "minLength": 1, "default": "x"},
            "anything": {"default": None},
        },
    }
