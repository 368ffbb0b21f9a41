"""The next mini-batch is read, cut and placed while ranks work on the present one, and nothing of a run's bytes tells."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine import hookimpl
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.errors import ContractError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.ranks.world_transport import OwnRanksTransport
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]

pytestmark = pytest.mark.usefixtures("without_ray")

SETTINGS: dict[str, Any] = {
    "run": {"launch": "ray", "ranks": 2},
    "evaluation": {"every": 4},
    "checkpoint": {"every": 3, "keep": 10},
}
REDUCER = """
import numpy as np

from skyrl_engine import reducer


@reducer()
def refuse_sample(structure, config):
    wrong = np.isin(structure.sample_ids, [{sample}])[structure.sequence_index]
    return np.where(wrong, np.nan, structure.loss_weight / len(structure.sample_ids))
"""


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and runs do everything in its turn, as they do with a rank in this process."""
    return lambda: monkeypatch.setattr(OwnRanksTransport, "concurrent", False)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Everything in metrics.jsonl but times and memory."""
    records = read_metrics(directory / "metrics.jsonl")
    for record in records:
        for name in ("seconds", "cpu_seconds", "peak_bytes", "time", "start_time"):
            record.pop(name, None)
        record.get("metrics", {}).pop("tokens_per_second", None)
    return [record for record in records if record["kind"] in ("step", "evaluation")]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def states(directory: Path) -> dict[str, bytes]:
    """The files of all checkpoints, but those that name the run's directory and when files were written."""
    kept = files(directory / "checkpoints")
    return {
        name: data
        for name, data in kept.items()
        if Path(name).suffix in (".safetensors", ".distcp") or name.endswith("trainer.json")
    }


def assert_same_bytes(run: Path, other: Path) -> None:
    assert metrics(run) == metrics(other)
    assert states(run)
    assert states(run) == states(other)
    assert files(run / "model") == files(other / "model")


class Stop:
    """Sends this process SIGTERM once a step is recorded."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        if event.step == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_the_next_batch_is_placed_while_ranks_work_and_none_after_the_last(configure: Configure, monkeypatch) -> None:
    """By the order of events: two shards, of two ranks, lie between a pass and the wait for its answers."""
    events: list[str] = []
    put, send = OwnRanksTransport.put, OwnRanksTransport.send

    def recording_put(self, shard):
        events.append("put")
        return put(self, shard)

    def recording_send(self, messages):
        verb, wait = messages[0].verb, send(self, messages)
        learns = getattr(getattr(messages[0], "work", None), "mode", verb) == "forward_backward"
        events.append("pass" if learns else verb)

        def waiting():
            if learns:
                events.append("answers")
            return wait()

        return waiting

    monkeypatch.setattr(OwnRanksTransport, "put", recording_put)
    monkeypatch.setattr(OwnRanksTransport, "send", recording_send)
    run_sft(configure("run", run=SETTINGS["run"], training={"steps": 3}, evaluation={"at_end": False}))
    told = [event for event in events if event in ("put", "pass", "answers")]
    ahead = ["pass", "put", "put", "answers"]
    assert told == ["put", "put", *ahead, *ahead, "pass", "answers"]


def test_bytes_are_those_of_a_run_in_turn(configure: Configure, in_turn: Callable[[], None]) -> None:
    """Metrics, evaluations, every checkpoint with its place in the data, and the model; over the end of several epochs."""
    ahead = run_sft(configure("ahead", **SETTINGS)).directory
    in_turn()
    assert_same_bytes(ahead, run_sft(configure("in-turn", **SETTINGS)).directory)


@pytest.mark.nightly
def test_a_run_that_was_stopped_goes_on_from_the_step_that_was_saved(configure: Configure, in_turn: Callable[[], None]) -> None:
    """At step 5 the mini-batch of step 6 was placed already; step 6 takes it all the same."""
    resolved = configure("ahead", **SETTINGS)
    stopped = run_sft(resolved, observers=[Stop(5)])
    assert (stopped.step, stopped.stopped_by) == (5, "SIGTERM")
    resumed = run_sft(resolved, resume=True).directory
    in_turn()
    reference = run_sft(configure("in-turn", **SETTINGS)).directory
    assert metrics(resumed) == metrics(reference)
    assert files(resumed / "model") == files(reference / "model")


def test_an_error_in_the_next_batch_is_raised_when_its_turn_comes(configure: Configure, tmp_path: Path, in_turn) -> None:
    """The reducer refuses a sample of step 2: step 1 is done, recorded and saved, as in turn."""
    _, position = (order := SampleOrder(23, 8, seed=5)).mini_batch(order.start())
    (tmp_path / "careful.py").write_text(REDUCER.format(sample=order.mini_batch(position)[0][0]))
    settings = {**SETTINGS, "reducer": {"use": f"{tmp_path}/careful.py:refuse_sample"}, "checkpoint": {"every": 1}}

    def fail(name: str) -> tuple[str, Path]:
        with pytest.raises(ContractError) as raised:
            run_sft(configure(name, **settings))
        return str(raised.value), tmp_path / name

    said, ahead = fail("ahead")
    in_turn()
    said_in_turn, reference = fail("in-turn")
    assert "weight nan" in said
    assert said == said_in_turn
    assert metrics(ahead) == metrics(reference)
    assert [record["step"] for record in metrics(ahead)] == [1]
    assert states(ahead)
    assert states(ahead) == states(reference)
    assert json.loads((ahead / "checkpoints" / "step-00000001" / "trainer.json").read_text())["offset"] == 8
