"""Ranks that share cores: said, and refused beyond four per core unless that is meant."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_engine.config.schema import RunConfig
from skyrl_engine.engine import cpu_check
from skyrl_engine.engine.cpu_check import describe_sharing
from skyrl_engine.errors import UnsupportedError


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_check, "usable_cores", lambda: 2)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"launch": "inline"}, None),
        ({"launch": "ray", "ranks": 2}, None),
        ({"launch": "ray", "ranks": 4}, "4 ranks share 2 cores"),
        ({"launch": "ray", "ranks": 8}, "8 ranks share 2 cores"),
        ({"launch": "ray", "ranks": 64, "oversubscribe": True}, "64 ranks share 2 cores"),
        ({"launch": "ray", "ranks": 64, "ray_address": "auto"}, None),
    ],
)
def test_what_is_said(run: dict[str, Any], message: str | None) -> None:
    assert describe_sharing(RunConfig(**run)) == message


def test_more_than_four_ranks_per_core_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        UnsupportedError, match=r"run.ranks = 9, and 9 ranks share 2 cores: at most 4 ranks per core, here 8, start"
    ) as caught:
        describe_sharing(RunConfig(launch="ray", ranks=9))
    assert "run.oversubscribe = true" in caught.value.remedy


def test_a_cluster_that_the_program_has_joined_decides_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert describe_sharing(RunConfig(launch="ray", ranks=64)) is None


def test_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_check, "usable_cores", lambda: 1)
    assert describe_sharing(RunConfig(launch="ray", ranks=3)) == "3 ranks share 1 core"
