"""Callbacks of transformers, and metrics, as observers of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from skyrl_engine.contracts import CheckpointSaved, EvaluationFinished, SessionFinished, SessionStarted, StepFinished
from skyrl_engine.errors import ContractError, UnsupportedError
from skyrl_engine.interop import hf_callback, metric_observer
from skyrl_engine.testing import ObserverConformance


class Recorder(TrainerCallback):  # type: ignore[misc] # transformers has no types
    """Keeps what it is told: the event, the step, and logs or metrics."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_more: Any) -> None:
        self.told.append(("train_begin", state.global_step, args.max_steps, Path(args.output_dir).name))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.told.append(("step_begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.told.append(("step_end", state.global_step, state.epoch))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
        self.told.append(("log", state.global_step, logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_more: Any) -> None:
        self.told.append(("evaluate", state.global_step, metrics))

    def on_save(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.told.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.told.append(("train_end", state.global_step, len(state.log_history)))


class Mean:
    """A metric with the methods of torchmetrics' MeanMetric."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.values.append(value)

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.values).mean()

    def reset(self) -> None:
        self.values = []


def read_loss(event: Any) -> tuple[float] | None:
    return (event.metrics["loss"],) if isinstance(event, StepFinished) else None


def start(observer: Any, folder: Path, at: int = 0) -> None:
    observer.skyrl_engine_session_started(SessionStarted(folder, {}, total_steps=9, start_step=at))


def step(observer: Any, number: int, loss: float) -> None:
    observer.skyrl_engine_step_finished(StepFinished(number, 9, {"loss": loss, "epoch": number / 2}, 0.1))


def test_a_callback_is_told_a_run_as_trainer_tells_it(tmp_path: Path) -> None:
    recorder = Recorder()
    observer = hf_callback(recorder).skyrl_engine_make_observer()
    start(observer, tmp_path, at=3)
    step(observer, 4, 0.5)
    observer.skyrl_engine_evaluation_finished(EvaluationFinished(4, {"loss": 0.25}, 0.1))
    observer.skyrl_engine_checkpoint_saved(CheckpointSaved(4, tmp_path))
    observer.skyrl_engine_session_finished(SessionFinished(4))
    assert recorder.told == [
        ("train_begin", 3, 9, tmp_path.name),
        ("step_begin", 3),
        ("step_end", 4, 2.0),
        ("log", 4, {"loss": 0.5, "epoch": 2.0}),
        ("log", 4, {"eval_loss": 0.25}),
        ("evaluate", 4, {"eval_loss": 0.25}),
        ("save", 4),
        ("train_end", 4, 2),
    ]


def test_a_callback_that_steers_is_refused_and_not_ignored(tmp_path: Path) -> None:
    class Stops(TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> Any:
            control.should_training_stop = True
            return control

    observer = hf_callback(Stops).skyrl_engine_make_observer()
    start(observer, tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"Stops set should_training_stop in on_step_end.*only watches\. .*evaluation\.patience"
    ):
        step(observer, 1, 0.5)
    # which asks for metric_for_best_model of the arguments, and says so itself
    early = hf_callback(EarlyStoppingCallback()).skyrl_engine_make_observer()
    with pytest.raises(AssertionError):
        start(early, tmp_path)


def read_lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "Mean.jsonl").read_text().splitlines()]


def test_a_metric_is_written_after_every_step_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    def make(over: int | None = 1) -> Any:
        return metric_observer(Mean(), read_loss, over=over).skyrl_engine_make_observer()

    observer = make()
    start(observer, tmp_path)
    for number, loss in enumerate((1.0, 3.0, float("nan")), 1):
        step(observer, number, loss)
    observer.skyrl_engine_evaluation_finished(EvaluationFinished(3, {"loss": 0.25}, 0.1))
    assert read_lines(tmp_path) == [{"step": 1, "value": 1.0}, {"step": 2, "value": 3.0}, {"step": 3, "value": None}]
    # a kill has cut a line, and the last checkpoint is of step 1
    with (tmp_path / "Mean.jsonl").open("a") as stream:
        stream.write('{"step": 4, "va')
    for over, due in ((1, [1.0, 3.0, 5.0]), (None, [1.0, 3.0, 4.0]), (2, [1.0, 3.0, 4.0])):
        resumed = make(over)
        start(resumed, tmp_path, at=1)
        step(resumed, 2, 3.0)
        step(resumed, 3, 5.0)
        assert [line["value"] for line in read_lines(tmp_path)] == due
    step(resumed, 4, 9.0)
    assert read_lines(tmp_path)[-1] == {"step": 4, "value": 9.0}


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(ContractError, match="list has no method update"):
        metric_observer([], read_loss)


class TestCallback(ObserverConformance):
    def observer(self) -> object:
        return hf_callback(Recorder).skyrl_engine_make_observer()


class TestMetric(ObserverConformance):
    make: Callable[[], Any] = staticmethod(Mean)

    def observer(self) -> object:
        return metric_observer(self.make(), read_loss).skyrl_engine_make_observer()
