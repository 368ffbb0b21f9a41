"""Training on preferences: the steps of fine-tuning, with scores of a frozen reference added to every plan."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from attrs import define

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import AnyArray, Ragged
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.training.loop import RunResult
from skyrl_engine.training.preference.baseline import baseline_of, mismatched
from skyrl_engine.training.preference.preparation import BASELINE, PreparedPreference, prepare
from skyrl_engine.training.reference import REFERENCE, REFERENCE_MODEL
from skyrl_engine.training.sft.data import DataProgress
from skyrl_engine.training.sft.order import Position
from skyrl_engine.training.sft.plan import RunPlan
from skyrl_engine.training.sft.trainer import SftTrainer, Start, plan_on_data, train_on_data


def plan_preference(resolved: ResolvedConfig, *, progress: DataProgress | None = None) -> RunPlan:
    """Do everything up to starting ranks, and say what the run would do. Writes no run directory."""
    return plan_on_data(resolved, prepare(resolved, progress).run)


def run_preference(
    resolved: ResolvedConfig,
    *,
    observers: Sequence[object] = (),
    resume: bool | None = None,
    progress: DataProgress | None = None,
) -> RunResult:
    """Train to the configured end, or until a signal asks to stop; arguments and failures as those of `run_sft`."""

    def start() -> Start:
        prepared = prepare(resolved, progress)
        return Start(prepared.run, partial(_trainer, prepared))

    return train_on_data(resolved, start, observers=observers, resume=resume)


def _trainer(prepared: PreparedPreference, engine: Engine, position: Position, data: str) -> "PreferenceTrainer":
    if prepared.reference is not None:
        engine.add_frozen(prepared.reference)
    return PreferenceTrainer(prepared.run, engine, position, data, prepared)


@define(eq=False)
class PreferenceTrainer(SftTrainer):
    """The steps of a run on preferences. A step's scores are taken over its own plan, so that a model equal to its reference has log-ratios of
    exactly 0.
    """

    name: ClassVar[str] = "preference"
    mean_over: ClassVar[Literal["tokens", "sequences"]] = "sequences"

    preference: PreparedPreference

    def planned(self, columns: SampleColumns) -> Plan:
        """Return the plan of a mini-batch with what the loss reads: `ref_logprobs`, and KTO's baseline."""
        plan = self.engine.plan(columns)
        made: dict[str, AnyArray | Ragged] = {}
        if REFERENCE in self.prepared.assembly.objective.columns:
            scores = self.engine.score(plan, tokens="loss", model=REFERENCE_MODEL).result()
            made[REFERENCE] = scores.on_actions("logprobs")
        if self.preference.baseline:
            made[BASELINE] = np.full(int(columns.action_offsets[-1]), self._baseline(columns), dtype=np.float32)
        return plan.with_columns(made)

    def _baseline(self, columns: SampleColumns) -> float:
        """KTO's baseline of a mini-batch, 0 where it has but one prompt."""
        others = mismatched(columns, self.preference.longest)
        if others is None:
            return 0.0
        plan = self.engine.plan(others)
        policy = self.engine.score(plan, tokens="loss")
        reference = self.engine.score(plan, tokens="loss", model=REFERENCE_MODEL)
        return baseline_of(policy.result(), reference.result())
