"""The bytes that `plan` counts are those that each rank holds in its second step, by the profiler's allocation events, within 15 %.

Most of them are the library's buffers, whose size does not depend on the model, so that the widths are larger than those of other backends.
"""

from pathlib import Path

import pytest
from measuring.held import require_planned_bytes

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("size", [128, 256, 384])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_hold_what_is_planned(tmp_path: Path, size: int, stage: int) -> None:
    require_planned_bytes("deepspeed", {"zero_stage": stage}, tmp_path, size=size)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_with_frozen_layers_hold_what_is_planned(tmp_path: Path, stage: int) -> None:
    freeze = ("model.layers.[0-2].*", "*.embed_tokens.*")
    require_planned_bytes("deepspeed", {"zero_stage": stage}, tmp_path, size=256, freeze=freeze)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_in_bfloat16_hold_what_is_planned(tmp_path: Path, stage: int) -> None:
    require_planned_bytes("deepspeed", {"zero_stage": stage}, tmp_path, size=128, dtype="bfloat16")
