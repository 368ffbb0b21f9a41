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
