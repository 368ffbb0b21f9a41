"""A TrainerCallback of transformers as an observer of a run."""

from collections.abc import Mapping
from typing import Any

from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.observer import (
    CheckpointSaved,
    EvaluationFinished,
    SessionFinished,
    SessionStarted,
    StepFinished,
)
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.hooks.markers import hookimpl


def hf_callback(callback: Any, *, name: str | None = None) -> "HfCallbackPlugin":
    """Return a plugin of the kind observer that tells a `TrainerCallback`, an instance or its class, what happens in a run.

    It is called as Trainer calls it: `on_train_begin`, then `on_step_begin`, `on_step_end` and `on_log` with every step's metrics,
    `on_evaluate`, `on_save`, and `on_train_end`. `args` are `TrainingArguments` of `output_dir` and `max_steps`; `state` is a
    `TrainerState`, whose `log_history` of a resumed run begins with it. Model, optimizer, dataloaders and tokenizer live
    on the ranks and are not passed.
    """
    called = callback if isinstance(callback, type) else type(callback)
    return HfCallbackPlugin(callback, name or called.__name__)


@frozen(eq=False)
class HfCallbackPlugin:
    """The product of `hf_callback`."""

    callback: Any
    name: str

    @hookimpl
    def skyrl_engine_make_observer(self) -> "HfCallbackObserver":
        return HfCallbackObserver(self.callback() if isinstance(self.callback, type) else self.callback)


@define(eq=False)
class HfCallbackObserver:
    """One session told to a callback. Raises UnsupportedError where the callback asks to steer it: an observer watches."""

    callback: Any
    _arguments: Any = field(default=None, init=False)
    _state: Any = field(default=None, init=False)
    _control: Any = field(default=None, init=False)

    @hookimpl
    def skyrl_engine_session_started(self, event: SessionStarted) -> None:
        from transformers import TrainerControl, TrainerState, TrainingArguments

        self._arguments = TrainingArguments(
            output_dir=str(event.directory), max_steps=event.total_steps, logging_steps=1, report_to=[], use_cpu=True
        )
        self._state = TrainerState(
            global_step=event.start_step,
            max_steps=event.total_steps,
            logging_steps=1,
            is_local_process_zero=True,
            is_world_process_zero=True,
        )
        self._control = TrainerControl()
        self._call("on_train_begin")

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self._call("on_step_begin")
        self._state.global_step = event.step
        self._state.epoch = event.metrics.get("epoch")
        self._call("on_step_end")
        self._log(event.metrics)

    @hookimpl
    def skyrl_engine_evaluation_finished(self, event: EvaluationFinished) -> None:
        metrics = {f"eval_{name}": value for name, value in event.metrics.items()}
        self._log(metrics)
        self._call("on_evaluate", metrics=metrics)

    @hookimpl
    def skyrl_engine_checkpoint_saved(self, event: CheckpointSaved) -> None:  # noqa: ARG002 -- the hook's argument; callbacks look at args
        self._call("on_save")

    @hookimpl
    def skyrl_engine_session_finished(self, event: SessionFinished) -> None:  # noqa: ARG002 -- the hook's argument; no callback is told why
        if self._state is not None:
            self._call("on_train_end", may_ask=True)

    def _log(self, metrics: Mapping[str, float]) -> None:
        logs = dict(metrics)
        self._state.log_history.append({**logs, "step": self._state.global_step})
        self._call("on_log", logs=logs)

    def _call(self, event: str, *, may_ask: bool = False, **more: Any) -> None:
        """Call the callback. What it asks for at the end of a run comes too late in Trainer as well."""
        answer = getattr(self.callback, event)(self._arguments, self._state, self._control, **more)
        control = self._control if answer is None else answer
        asked = [name for name, value in vars(control).items() if name.startswith("should_") and value]
        if asked and not may_ask:
            raise UnsupportedError(
                f"the callback {type(self.callback).__name__} set {asked[0]} in {event}, and an observer of this engine only watches",
                remedy="Take it out; early stopping is evaluation.patience",
            )
