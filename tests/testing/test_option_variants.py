"""`verify` tries what an option may be, not only its default: a plugin that fails with an allowed value is broken, and the value is named."""

from pathlib import Path

import pytest

from skyrl_engine.testing import verify
from skyrl_engine.testing.subject import selected

LOSS = """
from typing import Literal

from attrs import define, field
from attrs.validators import ge, in_, optional
from skyrl_engine import loss


@define
class Options:
    form: str = field(default="plain", validator=in_(("plain", "mean")))
    strength: float = field(default=1.0, validator=ge(0))
    limit: float | None = field(default=None, validator=optional(ge(0)))
    sign: Literal[1, -1] = 1


@loss(needs=("logprobs",), config=Options)
def mine(tokens, config):
    values = -config.sign * config.strength * tokens.logprobs
    return values / max(len(values), 1) if config.form == "mean" else values


@define
class Divided:
    by: float = field(default=1.0, validator=ge(0))


@loss(needs=("logprobs",), config=Divided)
def divided(tokens, config):
    return -tokens.logprobs / config.by
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(LOSS)
    return tmp_path


def test_an_allowed_value_that_breaks_a_promise_is_found_and_named(file: Path) -> None:
    plugin = selected("loss", "./mine.py:mine", {}, base=file)
    assert verify(plugin, examples=8).kept, "the default is right"
    broken = verify(plugin, examples=8, given=()).of_status("broken")
    assert {each.promise for each in broken} >= {"micro_batch_split"}
    assert all(each.cause is not None and each.cause.startswith("with form = 'mean', which its options allow: ") for each in broken)


def test_an_option_that_is_given_keeps_its_value(file: Path) -> None:
    plugin = selected("loss", "./mine.py:mine", {"form": "plain"}, base=file)
    assert verify(plugin, examples=8, given=("form",)).kept, "a strength of 0 learns nothing, by intention"


def test_bounds_are_allowed_too(file: Path) -> None:
    plugin = selected("loss", "./mine.py:divided", {}, base=file)
    (first, *_) = verify(plugin, examples=8, given=()).of_status("broken")
    assert first.cause is not None
    assert first.cause.startswith("with by = 0.0, which its options allow: ")
