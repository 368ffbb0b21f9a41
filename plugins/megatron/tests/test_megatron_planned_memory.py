"""The bytes that `plan` counts are those that each rank holds in its second step, by the profiler's allocation events, within 15 %."""

from pathlib import Path
from typing import Any

import pytest
from measuring.held import require_planned_bytes

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=["dp", "tp", "pp"])
def test_ranks_hold_what_is_planned(tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    require_planned_bytes("megatron", options, tmp_path, size=size)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 2}], ids=["dp", "tp"])
def test_ranks_in_bfloat16_hold_what_is_planned(tmp_path: Path, options: dict[str, Any]) -> None:
    require_planned_bytes("megatron", options, tmp_path, size=128, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_with_frozen_parameters_hold_what_is_planned(tmp_path: Path, dtype: str) -> None:
    freeze = ("model.layers.[0-2].*", "*.embed_tokens.*")
    require_planned_bytes("megatron", {"tensor_parallel": 2}, tmp_path, size=128, dtype=dtype, freeze=freeze)


@pytest.mark.parametrize("options", [{}, {"expert_parallel": 2}, {"expert_parallel": 2, "distributed_optimizer": False}], ids=str)
def test_ranks_that_hold_experts_for_each_other_hold_what_is_planned(tmp_path: Path, options: dict[str, Any]) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 256}
    require_planned_bytes("megatron", options, tmp_path, size=128, family="qwen3_moe", sizes=sizes)


@pytest.mark.parametrize(
    ("family", "options", "layers"),
    [
        ("olmo2", {"tensor_parallel": 2}, 4),
        ("gemma3_text", {}, 4),
        ("phi3", {"tensor_parallel": 2}, 4),
        ("llama", {"pipeline_parallel": 2}, 5),
    ],
)
def test_ranks_of_other_families_hold_what_is_planned(tmp_path: Path, family: str, options: dict[str, Any], layers: int) -> None:
    require_planned_bytes("megatron", options, tmp_path, size=128, family=family, layers=layers)
