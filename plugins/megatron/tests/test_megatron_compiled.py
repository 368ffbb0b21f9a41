"""Compiled layers of Megatron: loss, scores and gradients are those without, and both passes have the same bits."""

from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_engine.testing.backends.bench import Bench
from skyrl_engine.testing.backends.speed_promises import compare_compiled
from skyrl_engine.testing.backends.subject import BackendCase, BackendSubject
from skyrl_engine.testing.subject import select_plugin

# programs take a minute to make, on each rank
pytestmark = pytest.mark.nightly

BFLOAT16 = {"dtype": "bfloat16", "tolerance": 5e-2}
"""A program rounds where its operations end, and not between them."""


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as opened:
        yield opened


@pytest.mark.parametrize(
    ("layout", "settings", "model"),
    [
        ("dp2", {}, {}),
        ("tp2", {}, {}),
        ("tp2", {"sequence_parallel": False}, {"activation_checkpointing": True}),
        ("pp2", {}, {}),
        ("cp2", {}, {}),
        ("tp2xpp2", {}, {"activation_checkpointing": True}),
        ("dp1", {}, {"rows": "tree"}),
        ("dp1", {}, {"rows": "padded", "activation_checkpointing": True}),
        ("dp1", {}, BFLOAT16),
        ("tp2", {}, BFLOAT16),
    ],
)
def test_compiled_layers_compute_the_same(bench: Bench, layout: str, settings: dict[str, Any], model: dict[str, Any]) -> None:
    subject = BackendSubject(select_plugin("backend", "skyrl-engine-megatron:megatron", settings), bench, (layout,))
    compare_compiled(subject, BackendCase(layout), **model)
