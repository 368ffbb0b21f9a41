"""The backend kit gives a rank what the engine gives it."""

from typing import Any

import pytest

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.contracts.values.topology import RankCoords
from skyrl_engine.testing.backends import held_backend
from skyrl_engine.testing.backends.held_backend import HeldBackend, PassOrder, on_rank
from skyrl_engine.testing.backends.ranks import BackendRanks, RankFailed, RankMixesDevices
from skyrl_engine.testing.other_device import WrongDevice


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


@pytest.mark.parametrize("wraps", [False, True])
def test_a_rank_that_mixes_devices_is_told_by_its_type(monkeypatch: pytest.MonkeyPatch, wraps: bool) -> None:
    def fail(*_: object) -> None:
        try:
            raise WrongDevice("an operation mixes devices, at layer.py:3")
        except WrongDevice as error:
            if wraps:
                raise RuntimeError("the pass failed") from error
            raise

    monkeypatch.setattr(held_backend, "call_held", fail)
    held = BackendRanks.__new__(BackendRanks)
    held._call = lambda *call: [on_rank(*call)]
    with pytest.raises(RankMixesDevices) as failed:
        held.zero_grad()
    assert failed.value.operation == "an operation mixes devices, at layer.py:3"
    assert failed.value.cause.startswith("rank 0 fails in zero_grad: " + ("RuntimeError" if wraps else "WrongDevice"))


def test_words_about_devices_do_not_make_a_rank_mix_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no WrongDevice: only a file is missing")

    monkeypatch.setattr(held_backend, "call_held", fail)
    held = BackendRanks.__new__(BackendRanks)
    held._call = lambda *call: [on_rank(*call)]
    with pytest.raises(RankFailed) as failed:
        held.zero_grad()
    assert not isinstance(failed.value, RankMixesDevices)
