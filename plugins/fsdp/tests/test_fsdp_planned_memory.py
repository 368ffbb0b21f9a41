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
                (128, {"dtype": "bfloat16", "lora": LoraConfig()}),
                (128, {"lora": LoraConfig(load_in_4bit=True)}),
                (128, {"dtype": "bfloat16", "lora": LoraConfig(load_in_4bit=True, double_quantization=True)}),
            ]
        ),
    ],
)
def test_ranks_hold_what_is_planned(tmp_path: Path, size: int, settings: dict[str, Any]) -> None:
    require_planned_bytes("fsdp", {}, tmp_path, size=size, **settings)
