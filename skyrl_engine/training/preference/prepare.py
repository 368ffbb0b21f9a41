"""Everything of a run on preferences that can be decided before a rank starts: that of a run over a dataset, and the reference."""

from attrs import evolve, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.training.frozen_model_compat import refuse_blind_model
from skyrl_engine.training.preference.checks import (
    AFTER_BUILDING,
    BASELINE,
    BEFORE_BUILDING,
    GIVEN,
    check_baseline,
    reads_reference,
)
from skyrl_engine.training.reference import plan_reference
from skyrl_engine.training.sft.prepare import DataProgress, PreparedRun
from skyrl_engine.training.sft.prepare import prepare as prepare_data


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
        """The model that the reference is: its own, or the trained one without adapters, or over rounded weights with new ones."""
        assert self.reference is not None, "a loss without a reference asks for none"
        model = self.run.resolved.config.model
        is_rounded = model.lora is not None and model.lora.load_in_4bit
        return self.reference.model or (model if is_rounded else evolve(model, lora=None))

    @property
    def longest(self) -> int | None:
        """The longest row in tokens that the model is given; None where nothing bounds it."""
        facts, data = self.run.files.facts, self.run.resolved.config.data
        bounds = [bound for bound in (data.max_length, facts.context_length, facts.rotary_length) if bound is not None]
        return min(bounds, default=None)


def prepare(resolved: ResolvedConfig, progress: DataProgress | None = None) -> PreparedPreference:
    """Load the preferences, make the controller's plugins, and refuse what cannot work. Starts nothing.

    Raises what preparing a run over a dataset raises; DataError where KTO's baseline would find no answer to another prompt;
    UnsupportedError for a loss without preferences, for dropout with a reference, and for a reference that the backend does not have.
    """
    run = prepare_data(
        resolved, progress, reading="preferences", computed=GIVEN, before_building=BEFORE_BUILDING, after_building=AFTER_BUILDING
    )
    check_baseline(run)
    reference = None
    if reads_reference(run.assembly.objective):
        reference = plan_reference(run.resolved, run.assembly, run.files)
        datasets = (run.train, *(() if run.evaluation is None else (run.evaluation,)))
        refuse_blind_model("the reference", "reference", reference, images=any(dataset.images is not None for dataset in datasets))
    return PreparedPreference(run, reference, BASELINE in run.assembly.objective.columns)
