"""The bytes that `plan` counts are those that each rank holds in its second step, by the profiler's allocation events, within 15 %."""

from pathlib import Path
from typing import Any

import pytest
from measuring.held import require_planned_bytes

from skyrl_engine.contracts import LoraConfig


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (64, {}),
        *(
            pytest.param(size, settings, marks=pytest.mark.nightly)
            for size, settings in [
                (128, {}),
                (256, {}),
                (128, {"dtype": "bfloat16"}),
                (128, {"activation_checkpointing": True}),
                (128, {"freeze": ("model.layers.[0-2].*", "*.embed_tokens.*")}),
                (128, {"dtype": "bfloat16", "freeze": ("model.layers.[0-2].*", "*.embed_tokens.*")}),
                (128, {"dtype": "bfloat16", "lora": LoraConfig()}),
                (128, {"lora": LoraConfig(load_in_4bit=True)}),
                (128, {"dtype": "bfloat16", "lora": LoraConfig(load_in_4bit=True, double_quantization=True)}),
            ]
        ),
    ],
)
def test_ranks_hold_what_is_planned(tmp_path: Path, size: int, settings: dict[str, Any]) -> None:
    require_planned_bytes("fsdp", {}, tmp_path, size=size, **settings)


@pytest.mark.nightly
def test_tensor_parallel_ranks_hold_what_is_planned(tmp_path: Path) -> None:
    require_planned_bytes("fsdp", {"tensor_parallel": 2}, tmp_path, size=128)


@pytest.mark.nightly
@pytest.mark.parametrize("recomputes", [False, True])
def test_context_parallel_ranks_hold_what_is_planned(tmp_path: Path, recomputes: bool) -> None:
    require_planned_bytes("fsdp", {"context_parallel": 2}, tmp_path, size=128, activation_checkpointing=recomputes)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_summed_once_is_whole(tmp_path: Path, dtype: str) -> None:
    require_planned_bytes("fsdp", {"gradient_sync": "pass"}, tmp_path, size=128, dtype=dtype)


@pytest.mark.parametrize("size", [64, pytest.param(128, marks=pytest.mark.nightly), pytest.param(256, marks=pytest.mark.nightly)])
def test_weights_without_masters_are_held_in_two_bytes(tmp_path: Path, size: int) -> None:
    require_planned_bytes("fsdp", {}, tmp_path, size=size, dtype="bfloat16", stochastic_rounding=True)


@pytest.mark.parametrize(
    "options",
    [
        {"expert_parallel": 2},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in ({}, {"expert_parallel": 2, "gradient_sync": "pass"}, {"expert_parallel": 2, "context_parallel": 2})
        ),
    ],
    ids=str,
)
def test_ranks_that_hold_experts_for_each_other_hold_what_is_planned(tmp_path: Path, options: dict[str, Any]) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 256}
    require_planned_bytes("fsdp", options, tmp_path, size=128, family="qwen3_moe", sizes=sizes)
