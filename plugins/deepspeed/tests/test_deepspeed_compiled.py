"""Compiled layers of DeepSpeed, in every stage: loss, scores and gradients are those without, and both passes have the same bits."""

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
        *(("dp2", {"zero_stage": stage}, {}) for stage in range(3)),
        # every weight is divided, and none but the large ones
        *((layout, {"persistence_threshold": threshold}, {}) for layout in ("dp1", "dp2") for threshold in (0, 3000)),
        ("dp2", {"persistence_threshold": 0}, {"rows": "tree", "activation_checkpointing": True}),
        # nothing that the first layer gets learns
        ("dp1", {"persistence_threshold": 0}, {"lora": LoraConfig(rank=4)}),
        ("dp2", {"persistence_threshold": 0}, {"rows": "padded", "lora": LoraConfig(rank=4)}),
        ("dp1", {}, BFLOAT16),
        ("dp2", {"zero_stage": 2}, BFLOAT16),
        ("dp2", {"persistence_threshold": 0}, BFLOAT16),
    ],
)
def test_compiled_layers_compute_the_same(bench: Bench, layout: str, settings: dict[str, Any], model: dict[str, Any]) -> None:
    subject = BackendSubject(select_plugin("backend", "skyrl-engine-deepspeed:deepspeed", settings), bench, (layout,))
    compare_compiled(subject, BackendCase(layout), **model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_critic_with_compiled_layers_values_the_same(bench: Bench, stage: int) -> None:
    subject = BackendSubject(select_plugin("backend", "skyrl-engine-deepspeed:deepspeed", {"zero_stage": stage}), bench, ("dp2",))
    compare_compiled(subject, BackendCase("dp2", "critic"), needs=("values",), value_head=True)
