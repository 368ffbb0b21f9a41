"""The backend kit gives a rank what the engine gives it."""

from typing import Any

import pytest

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.contracts.values.topology import RankCoords
from skyrl_engine.testing.backends.ranks import HeldBackend, PassOrder


class Keeping:
    """Stands for a backend, and keeps what it was given."""

    def forward(self, batch: list[MicroBatch], objective: Any) -> RankOutput:
        self.batch = batch
        return RankOutput.empty()


@pytest.mark.parametrize("stage", [0, 1])
def test_pixels_go_to_the_first_stage_alone(stage: int) -> None:
    held, keeping = HeldBackend.__new__(HeldBackend), Keeping()
    held._coords, held._backend, held._teacher = RankCoords(pp=stage), keeping, None  # type: ignore[assignment]
    held.run("forward", PassOrder((((0, 1), (2,)),), pictures="own"))
    images = {"image_grid_thw"} if stage else {"image_grid_thw", "pixel_values"}
    assert len(keeping.batch) == 2
    for micro_batch in keeping.batch:
        assert micro_batch.inputs.keys() & {"image_grid_thw", "pixel_values"} == images
        assert micro_batch.ragged_offsets.keys() == images
        assert "mm_token_type_ids" in micro_batch.inputs
