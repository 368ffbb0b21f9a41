"""Training a reward model: the steps of fine-tuning, over pairs whose texts are given one value each."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

from attrs import define

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.run.session import recall_choices
from skyrl_engine.training.loop import RunResult
from skyrl_engine.training.reward_model.prepare import prepare
from skyrl_engine.training.sft.dry_run import RunPlan
from skyrl_engine.training.sft.prepare import DataProgress
from skyrl_engine.training.sft.trainer import SftTrainer, Start, plan_on_data, train_on_data


def plan_reward_model(resolved: ResolvedConfig, *, progress: DataProgress | None = None) -> RunPlan:
    """Do everything up to starting ranks, and say what the run would do. Writes no run directory."""
    return plan_on_data(prepare(recall_choices(resolved), progress))


def run_reward_model(
    resolved: ResolvedConfig,
    *,
    observers: Sequence[object] = (),
    resume: bool | None = None,
    progress: DataProgress | None = None,
) -> RunResult:
    """Train to the configured end, or until a signal asks to stop; arguments and failures as those of `run_sft`."""
    start = partial(start_reward_model, progress=progress)
    return train_on_data(resolved, start, observers=observers, resume=resume, progress=progress)


def start_reward_model(resolved: ResolvedConfig, *, progress: DataProgress | None = None) -> Start:
    """Prepare a run of this trainer."""
    prepared = prepare(resolved, progress)
    trainer = StepRewardTrainer if resolved.config.reward_model.labels == "steps" else RewardModelTrainer
    return Start(prepared, lambda place: trainer(prepared, place.engine, place.position, place.data))


@define(eq=False)
class RewardModelTrainer(SftTrainer):
    """The steps of a reward model's run."""

    name: ClassVar[str] = "reward_model"
    mean_over: ClassVar[Literal["tokens", "sequences"]] = "sequences"


@define(eq=False)
class StepRewardTrainer(RewardModelTrainer):
    """The steps of a process reward model's run, whose loss is a mean over the steps of answers."""

    mean_over: ClassVar[Literal["tokens", "sequences"]] = "tokens"
