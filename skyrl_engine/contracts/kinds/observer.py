"""The events that observers get."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from skyrl_engine.contracts.values.rollout import Group


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
    """A whole checkpoint is at `path`."""

    step: int
    path: Path


@frozen
class SessionFinished:
    """`error` is the one-line cause when the session failed, None when it ran to its end."""

    step: int
    error: str | None = None
