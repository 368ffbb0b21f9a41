"""`verify` tries what an option may be, not only its default: a plugin that fails with an allowed value is broken, and the value is named."""

from pathlib import Path

import pytest

from skyrl_engine.testing import verify
from skyrl_engine.testing.option_variants import variants
from skyrl_engine.testing.subject import select_plugin

pytestmark = pytest.mark.of_sources("skyrl_engine/testing", "skyrl_engine/contracts", "skyrl_engine/registry")

LOSS = """
from typing import Literal

from attrs import define, field
from attrs.validators import deep_iterable, ge, in_, optional
from skyrl_engine import loss
from skyrl_engine.contracts import DESCRIBES


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
class Local:
    optional_text: str | None = field(default=None, validator=optional(in_(("local",))))
    optional_literal: Literal["local"] | None = None
    optional_flag: bool | None = None
    members: tuple[str, ...] = field(default=(), validator=deep_iterable(in_(("local", "other"))))
    literals: list[Literal["local"]] = field(factory=list)
    optional_limit: float | None = field(default=2.0, validator=optional(ge(1)))


@loss(needs=("logprobs",), config=Local)
def local(tokens, config):
    chosen = "local" in (config.optional_text, config.optional_literal, *config.members, *config.literals) or config.optional_flag
    return -tokens.logprobs / max(len(tokens.logprobs), 1) if chosen else -tokens.logprobs


@define
class Described:
    form: Literal["plain", "mean"] = field(default="plain", metadata={DESCRIBES: "scale"})
    scale: Literal["mean"] | None = None


@loss(needs=("logprobs",), config=Described)
def described(tokens, config):
    return -tokens.logprobs


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
    """Each cause names the value, since the default is right."""
    plugin = select_plugin("loss", "./mine.py:mine", {}, base=file)
    broken = verify(plugin, examples=8, given=()).of_status("broken")
    assert {finding.promise for finding in broken} >= {"micro_batch_split"}
    assert all(
        finding.cause is not None and finding.cause.startswith("with form = 'mean', which its options allow: ")
        for finding in broken
    )


def test_an_option_that_is_given_keeps_its_value(file: Path) -> None:
    plugin = select_plugin("loss", "./mine.py:mine", {"form": "plain"}, base=file)
    assert verify(plugin, examples=8, given=("form",)).kept, "a strength of 0 learns nothing, by intention"


def test_an_option_that_describes_another_keeps_its_value(file: Path) -> None:
    plugin = select_plugin("loss", "./mine.py:described", {}, base=file)
    assert [label for label, *_ in variants(plugin, frozenset())] == ["scale = 'mean'"]


def test_bounds_are_allowed_too(file: Path) -> None:
    plugin = select_plugin("loss", "./mine.py:divided", {}, base=file)
    (first, *_) = verify(plugin, examples=8, given=()).of_status("broken")
    assert first.cause is not None
    assert first.cause.startswith("with by = 0.0, which its options allow: ")


def test_options_that_may_be_none_and_members_of_lists_are_tried(file: Path) -> None:
    plugin = select_plugin("loss", "./mine.py:local", {}, base=file)
    assert [label for label, *_ in variants(plugin, frozenset())] == [
        "optional_text = 'local'",
        "optional_literal = 'local'",
        "optional_flag = False",
        "optional_flag = True",
        "members = ['local']",
        "members = ['other']",
        "literals = ['local']",
        "optional_limit = none",
    ]
    names = ("optional_text", "optional_literal", "optional_flag", "literals")
    (first, *_) = verify(plugin, examples=8, given=names).of_status("broken")
    assert first.cause is not None
    assert first.cause.startswith("with members = ['local'], which its options allow: ")
