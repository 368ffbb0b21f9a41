"""A wrong return of a plugin in a real run is an error that names the plugin, never an internal error."""

import pytest

from skyrl_engine.errors import ContractError
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine_collators.padded.collator import PaddedCollator


def test_a_collator_that_builds_nothing(configure, monkeypatch) -> None:
    monkeypatch.setattr(PaddedCollator, "build", lambda *_args, **_named: None)
    with pytest.raises(ContractError, match=r"collator 'padded' of .* returned None from build") as refused:
        run_sft(configure("run", training={"steps": 4}))
    assert refused.value.exit_code == 3
