"""A run records what the engine chose, and goes on with it under the command line it began with, whatever would be chosen then."""

import json
import os
import signal
import tomllib
from typing import Any

import pytest

from skyrl_engine import hookimpl
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.engine import automatic
from skyrl_engine.training.sft.trainer import plan_sft, run_sft

COUNTED = {"micro_batch_rows": "none"}


class Stops:
    """An observer that asks its run to stop after a step."""

    def __init__(self, after: int) -> None:
        self._after = after

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        if event.step == self._after:
            os.kill(os.getpid(), signal.SIGTERM)


def weights(result: Any) -> bytes:
    return bytes((result.directory / "model" / "model.safetensors").read_bytes())


def begin(configure: Any, name: str, **changes: Any) -> ResolvedConfig:
    training = {**COUNTED, **changes.pop("training", {})}
    resolved: ResolvedConfig = configure(name, training=training, **changes)
    return resolved


def test_a_resume_takes_what_was_chosen(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_sft(begin(configure, "whole", training={"steps": 4}))
    begun = run_sft(begin(configure, "cut", training={"steps": 4}), observers=[Stops(2)])
    assert begun.stopped_by == "SIGTERM"
    chosen = tomllib.loads((begun.directory / "config.toml").read_text())
    assert chosen["training"]["micro_batch_tokens"] == automatic.CPU_MICRO_BATCH_TOKENS
    assert chosen["model"]["dtype"] == "float32"
    assert chosen["collator"]["use"] in ("skyrl-engine-collators:packed", "skyrl-engine-collators:tree")
    # another machine, on which the engine would choose otherwise
    monkeypatch.setattr(automatic, "CPU_MICRO_BATCH_TOKENS", 40)
    monkeypatch.setattr(automatic, "PREFERRED", ("padded",))
    again = begin(configure, "cut", training={"steps": 4}, checkpoint={"resume": True})
    assert plan_sft(again).chosen == ()
    ended = run_sft(again)
    assert weights(ended) == weights(whole)
    assert "differs from the checkpoint" not in (ended.directory / "run.log").read_text()
    manifest = json.loads((ended.directory / "run.json").read_text())
    assert [session["changed"] for session in manifest["sessions"]] == [[], []]


def test_a_resume_without_a_key_calls_its_value_as_the_checkpoint_does(configure: Any) -> None:
    """A run that began with a short name of its collator goes on without the key: the name's meaning is the same, and nothing is warned of."""
    said = {"training": {"steps": 4, "micro_batch_tokens": "none"}, "collator": {"use": "padded"}}
    begun = run_sft(begin(configure, "cut", **said), observers=[Stops(2)])
    assert begun.stopped_by == "SIGTERM"
    ended = run_sft(begin(configure, "cut", training={"steps": 4}, checkpoint={"resume": True}))
    assert ended.step == 4
    assert "differs from the checkpoint" not in (ended.directory / "run.log").read_text()
    manifest = json.loads((ended.directory / "run.json").read_text())
    assert [session["changed"] for session in manifest["sessions"]] == [[], []]


def test_first_lines_say_what_is_computed(configure: Any) -> None:
    log = (run_sft(begin(configure, "run", training={"steps": 2})).directory / "run.log").read_text()
    told = log[: log.index("training from step 0")]
    assert "collator.use = " in told
    assert "model.dtype = float32" in told
    assert "first mini-batch: padding " in told
