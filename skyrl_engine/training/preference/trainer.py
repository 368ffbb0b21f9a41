"""Training on preferences: the steps of fine-tuning, with scores of a frozen reference added to every plan."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from attrs import define, evolve

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import AnyArray, Ragged
from skyrl_engine.data.dataset import TokenizedDataset
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.objective.policy_metrics import Watched
from skyrl_engine.run.session import recall_choices
from skyrl_engine.training.loop import RunResult, StepDone
from skyrl_engine.training.moving_reference import MovingReference
from skyrl_engine.training.preference.baseline import NUMBER, compute_baseline, mismatch_answers, number_samples
from skyrl_engine.training.preference.checks import BASELINE
from skyrl_engine.training.preference.prepare import PreparedPreference, prepare
from skyrl_engine.training.preference.references import ReferenceScores, with_references
from skyrl_engine.training.reference import REFERENCE, REFERENCE_MODEL
from skyrl_engine.training.sft.dry_run import RunPlan
from skyrl_engine.training.sft.prepare import DataProgress
from skyrl_engine.training.sft.state import SftState
from skyrl_engine.training.sft.trainer import SftTrainer, Start, StartedRun, plan_on_data, train_on_data


def plan_preference(resolved: ResolvedConfig, *, progress: DataProgress | None = None) -> RunPlan:
    """Do everything up to starting ranks, and say what the run would do. Writes no run directory."""
    prepared = prepare(recall_choices(resolved), progress)
    # a precomputed reference is gone before the first step
    stays = prepared.reference is not None and not prepared.run.resolved.config.reference.precompute
    return plan_on_data(prepared.run, [prepared.reference] if stays and prepared.reference is not None else [])


def run_preference(
    resolved: ResolvedConfig,
    *,
    observers: Sequence[object] = (),
    resume: bool | None = None,
    progress: DataProgress | None = None,
) -> RunResult:
    """Train to the configured end, or until a signal asks to stop; arguments and failures as those of `run_sft`."""
    start = partial(start_preference, progress=progress)
    return train_on_data(resolved, start, observers=observers, resume=resume, progress=progress)


def start_preference(resolved: ResolvedConfig, *, progress: DataProgress | None = None) -> Start:
    """Prepare a run of this trainer."""
    prepared = prepare(resolved, progress)
    return Start(prepared.run, partial(_trainer, prepared, progress))


def _trainer(prepared: PreparedPreference, progress: DataProgress | None, place: StartedRun) -> "PreferenceTrainer":
    run, engine = prepared.run, place.engine
    reference: MovingReference | None = None
    mismatched: list[TokenizedDataset | None] = [None, None]
    if prepared.reference is not None and run.resolved.config.reference.precompute:
        train = _score_dataset(prepared, run.train, engine, progress)
        held_out = None if run.evaluation is None else _score_dataset(prepared, run.evaluation, engine, progress)
        if prepared.baseline:
            mismatched = [
                None if dataset is None else _mismatch_answers(prepared, dataset, engine, progress)
                for dataset in (run.train, run.evaluation)
            ]
            train, held_out = number_samples(train), None if held_out is None else number_samples(held_out)
        run = evolve(run, train=train, evaluation=held_out)
    elif prepared.reference is not None:
        table = run.resolved.config.reference
        reference = MovingReference.load(engine, place.references, table, prepared.reference, place.reference)
    return PreferenceTrainer(run, engine, place.position, place.data, prepared, reference, *mismatched)


def _score_dataset(
    prepared: PreparedPreference, dataset: TokenizedDataset, engine: Engine, progress: DataProgress | None
) -> TokenizedDataset:
    """Return the dataset with the reference's scores out of the cache, computed now where they are not there."""
    config = prepared.run.resolved.config
    scores = ReferenceScores.of(config.data.cache, prepared.frozen, dataset.columns)
    values = scores.read()
    if values is None:
        assert prepared.reference is not None, "somebody reads its scores"
        if REFERENCE_MODEL not in engine.group.frozen:
            engine.add_frozen(prepared.reference)
        scores.fill(engine, dataset, batch_size=prepared.run.order.batch_size, progress=progress)
        values = scores.read()
        assert values is not None, "what was written is whole"
    return with_references(dataset, values)


def _mismatch_answers(
    prepared: PreparedPreference, dataset: TokenizedDataset, engine: Engine, progress: DataProgress | None
) -> TokenizedDataset:
    """Return every prompt with the answer to another one of the dataset, scored by the reference as the dataset itself is."""
    columns = mismatch_answers(dataset.columns, prepared.longest)
    assert columns is not None, "planning refuses data with a single prompt"
    return _score_dataset(prepared, evolve(dataset, columns=columns), engine, progress)


@define(eq=False)
class PreferenceTrainer(SftTrainer):
    """The steps of a run on preferences. A step's scores are taken over its own plan, so that a model equal to its reference has log-ratios of
    exactly 0. `mismatched` and `mismatched_held_out` are what KTO's baseline is measured on where references are precomputed.
    """

    name: ClassVar[str] = "preference"
    mean_over: ClassVar[Literal["tokens", "sequences"]] = "sequences"

    preference: PreparedPreference
    reference: MovingReference | None
    mismatched: TokenizedDataset | None
    mismatched_held_out: TokenizedDataset | None

    @property
    def watch(self) -> tuple[Watched, ...]:
        """Entropy and mean logits, where they are asked for."""
        return ("entropy", "logits") if self.prepared.resolved.config.preference.vocabulary_metrics else ()

    def step(self, number: int) -> StepDone:
        """One optimizer step on the next mini-batch, and the reference that follows from it."""
        done = super().step(number)
        if self.reference is not None:
            self.reference.refresh(number)
        return done

    def state(self) -> Mapping[str, Any]:
        """The place in the sample order, and the copy that is the reference."""
        copied = None if self.reference is None else self.reference.copied
        return SftState.create(
            self.name, self.engine.step, self.position, self.prepared.order, self.data, reference=copied
        ).document()

    @property
    def asks_ranks(self) -> bool:
        """True where the reference scores a step's own plan, and with KTO's baseline, which the present weights decide."""
        return self._asks_reference(self.prepared.train.columns) or self.preference.baseline

    def _asks_reference(self, columns: SampleColumns) -> bool:
        return REFERENCE in self.prepared.assembly.objective.columns and REFERENCE not in columns.columns

    def complete(self, plan: Plan) -> Plan:
        """Add what the loss reads: `ref_logprobs`, and KTO's baseline."""
        return self._complete(plan, self.mismatched)

    def _plan_whole(self, columns: SampleColumns) -> Plan:
        return self._complete(self.engine.plan(columns), self.mismatched_held_out)

    def _complete(self, plan: Plan, mismatched: TokenizedDataset | None) -> Plan:
        columns = plan.columns
        new_columns: dict[str, AnyArray | Ragged] = {}
        if self._asks_reference(columns):
            scores = self.engine.score(plan, tokens="loss", model=REFERENCE_MODEL).result()
            new_columns[REFERENCE] = scores.on_actions("logprobs")
        if self.preference.baseline:
            baseline = self._baseline(columns) if mismatched is None else self._precomputed_baseline(columns, mismatched)
            new_columns[BASELINE] = np.full(int(columns.action_offsets[-1]), baseline, dtype=np.float32)
        return plan.with_columns(new_columns) if new_columns else plan

    def _baseline(self, columns: SampleColumns) -> float:
        """KTO's baseline of a mini-batch, 0 where it has but one prompt."""
        mismatched = mismatch_answers(columns, self.preference.longest)
        if mismatched is None:
            return 0.0
        plan = self.engine.plan(mismatched)
        # both are asked before either is waited for
        asked = [self.engine.score(plan, tokens="loss", model=model) for model in (None, REFERENCE_MODEL)]
        policy, reference = (scores.result().on_actions("logprobs").values for scores in asked)
        return compute_baseline(policy, reference, len(mismatched))

    def _precomputed_baseline(self, columns: SampleColumns, mismatched: TokenizedDataset) -> float:
        """KTO's baseline of a mini-batch, on the answers that its samples have in `mismatched`."""
        chosen = mismatched.batch(columns.sample_values[NUMBER])
        policy = self.engine.score(self.engine.plan(chosen), tokens="loss").result().on_actions("logprobs")
        return compute_baseline(policy.values, chosen.columns[REFERENCE], len(chosen))
