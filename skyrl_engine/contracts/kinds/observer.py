"""The events that observers get, and the two attributes that one may have.

    class Uploads:
        on_error = "warn"         # a failure is warned of, and the run goes on; without it, one stops the run
        finish_seconds = 60.0     # told in a thread of its own; the end of the run waits so long for it

The first is a default: `[observers.NAME] on_error` of the configuration comes before it. An observer whose failures stop the run is told in the
run's own thread, whatever its `finish_seconds`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from attrs import Factory, frozen

from skyrl_engine.contracts.values.rollout import Group

OnError: TypeAlias = Literal["stop", "warn"]
"""The consequence of an observer's failure: the run stops, or a warning says so and the run goes on."""


@frozen
class SessionStarted:
    """`directory` is the run directory; `manifest` the content of run.json; `total_steps` counts optimizer steps of the whole run."""

    directory: Path
    manifest: Mapping[str, Any]
    total_steps: int
    start_step: int = 0


@frozen(eq=False)
class RolloutsFinished:
    """The rollouts of optimizer step `step`, numbered from 1, before they are trained on; of trainer rl.

    `groups` are trained on, in the order of their tickets; `dropped` ended since the step before and are not, for the reason they name.
    """

    step: int
    groups: tuple[Group, ...]
    dropped: tuple[Group, ...] = ()


@frozen
class StepFinished:
    """One optimizer step, numbered from 1.

    `metrics` are final numbers (`loss`, `grad_norm`, `learning_rate`, `tokens`, the loss plugin's own); `seconds` is wall time;
    `cpu_seconds` CPU time by span ("plan", "dispatch", "build", "model", ...), controller and ranks added up; `peak_bytes` by rank the most
    memory since the step before: of tensors on a CUDA device, of the rank's process on CPUs; 0 where the system does not say.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    seconds: float
    cpu_seconds: Mapping[str, float] = Factory(dict)
    peak_bytes: tuple[int, ...] = ()


@frozen
class EvaluationFinished:
    """Metrics of one pass over the evaluation data after optimizer step `step`."""

    step: int
    metrics: Mapping[str, float]
    seconds: float


@frozen
class CheckpointSaved:
    """A whole checkpoint is at `path`.

    It took `seconds` from its beginning until it was whole. The run stood still for `blocked_seconds` of them, and for all of them where
    `checkpoint.asynchronous` is not set.
    """

    step: int
    path: Path
    seconds: float = 0.0
    blocked_seconds: float = 0.0


@frozen
class SessionFinished:
    """`error` is the one-line cause when the session failed, None when it ran to its end."""

    step: int
    error: str | None = None
