"""The page of the kit lists every promise of every kind, in its own words."""

from pathlib import Path

import pytest

from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.testing import promises_of
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES

PAGE = Path(__file__).parents[2] / "docs/how-to/verify-a-plugin.md"
OF_ALL = {promise.name for promise in PLUGIN_PROMISES}


def list_lines(heading):
    section = PAGE.read_text().partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    return [line for line in section.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("kind", list(KINDS))
def test_promises_of_a_kind(kind):
    rows = [f"| `{promise.name}` | {promise.sentence} |" for promise in promises_of(kind) if promise.name not in OF_ALL]
    assert list_lines(kind.capitalize().replace("_", " ")) == rows


def test_promises_of_every_kind():
    assert list_lines("Every kind") == [f"| `{promise.name}` | {promise.sentence} |" for promise in PLUGIN_PROMISES]
