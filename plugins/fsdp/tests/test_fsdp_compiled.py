"""Compiled layers of FSDP: loss, scores and gradients are those without, and both passes have the same bits."""

from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_engine.contracts import LoraConfig
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
        ("dp2", {"replicate": 2}, {"rows": "tree"}),
        ("dp2", {}, {"rows": "padded", "activation_checkpointing": True}),
        ("dp2", {"reshard_after_forward": False}, {"lora": LoraConfig(rank=4)}),
        ("cp2", {}, {}),
        ("dp1", {}, BFLOAT16),
        ("dp2", {}, BFLOAT16),
    ],
)
def test_compiled_layers_compute_the_same(bench: Bench, layout: str, settings: dict[str, Any], model: dict[str, Any]) -> None:
    subject = BackendSubject(select_plugin("backend", "skyrl-engine-fsdp:fsdp", settings), bench, (layout,))
    compare_compiled(subject, BackendCase(layout), **model)


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_a_critic_with_compiled_layers_values_the_same(bench: Bench, layout: str) -> None:
    subject = BackendSubject(select_plugin("backend", "skyrl-engine-fsdp:fsdp", {}), bench, (layout,))
    compare_compiled(subject, BackendCase(layout, "critic"), needs=("values",), value_head=True)
