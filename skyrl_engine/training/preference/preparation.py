"""Everything of a run on preferences that can be decided before a rank starts: that of a run over a dataset, and the reference."""

from typing import Final

from attrs import evolve, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.needs import ROLE_NEED
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ConfigError, Problem, Refusals, UnsupportedError
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.training.preference.baseline import refuse_single_prompts
from skyrl_engine.training.reference import REFERENCE, plan_reference, refuse_dropout, refuse_unread_reference
from skyrl_engine.training.sft.data import DataProgress, PreparedRun
from skyrl_engine.training.sft.data import prepare as prepare_data
from skyrl_engine.training.sft.order import SampleOrder

BASELINE: Final = "kl_baseline"
"""The column of KTO's baseline, which the trainer computes for every mini-batch."""

GIVEN: Final = frozenset((REFERENCE, BASELINE))
"""Columns that the trainer provides."""


@frozen(eq=False)
class PreparedPreference:
    """A run that is ready to start its ranks. `reference` is the frozen model that a part of the loss reads, None where none does; `baseline`
    says that one reads KTO's baseline.
    """

    run: PreparedRun
    reference: FrozenModel | None
    baseline: bool

    @property
    def frozen(self) -> ModelConfig:
        """The model that the reference is: its own, or the trained one without adapters."""
        assert self.reference is not None, "a loss without a reference asks for none"
        return self.reference.model or evolve(self.run.resolved.config.model, lora=None)

    @property
    def longest(self) -> int | None:
        """The longest row in tokens that the model is given; None where nothing bounds it."""
        facts, data = self.run.files.facts, self.run.resolved.config.data
        bounds = [each for each in (data.max_length, facts.context_length, facts.rotary_length) if each is not None]
        return min(bounds, default=None)


def prepare(resolved: ResolvedConfig, progress: DataProgress | None = None) -> PreparedPreference:
    """Load the preferences, make the controller's plugins, and refuse what cannot work. Starts nothing.

    Raises what preparing a run over a dataset raises; DataError where KTO's baseline would find no answer to another prompt;
    UnsupportedError for a loss without preferences, for dropout beside a reference, and for a reference that the backend does not have.
    """
    config = resolved.config
    refusals = Refusals()
    with refusals.collect():
        if config.reference.refresh_every is not None:
            raise ConfigError(
                [
                    Problem(
                        "reference.refresh_every",
                        "is of trainer rl: preferences are compared with the model as it was before training",
                        "Remove reference.refresh_every",
                    )
                ]
            )
    run = prepare_data(
        resolved,
        progress,
        reading="preferences",
        given=GIVEN,
        check=lambda assembly, files: _check_parts(resolved, assembly, files),
        refusals=refusals,
    )
    if BASELINE in run.assembly.objective.columns:
        order, evaluated = run.order, run.evaluation
        refuse_single_prompts(run.train.columns, order, run.total_steps, name=run.train.name)
        if evaluated is not None:
            held_out = SampleOrder.of(evaluated.columns, batch_size=order.batch_size, shuffle=False)
            refuse_single_prompts(evaluated.columns, held_out, held_out.steps_per_epoch, name=evaluated.name)
    reference = None
    if reads_reference(run.assembly.objective):
        reference = plan_reference(run.resolved, run.assembly, run.files)
    return PreparedPreference(run, reference, BASELINE in run.assembly.objective.columns)


def reads_reference(objective: ObjectiveParts) -> bool:
    """Say whether a part of the loss compares with a reference; KTO's baseline does."""
    return not {REFERENCE, BASELINE}.isdisjoint(objective.columns)


def _check_parts(resolved: ResolvedConfig, assembly: Assembly, files: ModelFiles) -> None:
    """Refuse parts that learn no preferences, and a reference or a baseline that cannot be, all at once."""
    config, objective, refusals = resolved.config, assembly.objective, Refusals()
    with refusals.collect():
        _refuse_no_preference(objective)
    baseline = BASELINE in objective.columns
    with refusals.collect():
        if baseline and config.training.batch_size < 2:
            raise ConfigError(
                [
                    Problem(
                        "training.batch_size",
                        f"is {config.training.batch_size}, and the baseline compares answers of several prompts of a mini-batch",
                        "Set training.batch_size to 2 or more",
                    )
                ]
            )
    with refusals.collect():
        if baseline and config.reference.precompute:
            raise UnsupportedError(
                "reference.precompute scores the answers of the data, and KTO's baseline is of mismatched ones, others in every step",
                remedy="Remove reference.precompute, or choose another loss",
            )
    with refusals.collect():
        if reads_reference(objective):
            refuse_dropout(files.facts, "the reference is scored without it: the first log-ratios would not be 0")
            plan_reference(resolved, assembly, files)
        elif config.reference.refresh_every is None:
            refuse_unread_reference(resolved)
    refusals.raise_all()


def _refuse_no_preference(objective: ObjectiveParts) -> None:
    if not any(ROLE_NEED in part.product.needs or part.on is not None for part in objective.losses):
        raise UnsupportedError(
            f"{objective.main.label} does not tell chosen from rejected answers, so it would learn both alike",
            remedy='Set loss.use = "dpo", or another loss of preferences, or train on single answers: trainer = "sft"',
        )
