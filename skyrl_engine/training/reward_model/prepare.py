"""Everything of a reward model's run that can be decided before a rank starts: that of a run over preferences, and what the export needs."""

import logging

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.needs import ROLE_NEED, model_score
from skyrl_engine.data.table.filling import STEP_LABEL
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ConfigError, Problem, UnsupportedError
from skyrl_engine.training.sft.checks import DataDraft
from skyrl_engine.training.sft.prepare import DataProgress, PreparedRun
from skyrl_engine.training.sft.prepare import prepare as prepare_data

logger = logging.getLogger(__name__)


def prepare(resolved: ResolvedConfig, progress: DataProgress | None = None) -> PreparedRun:
    """Load the preferences, make the controller's plugins, and refuse what cannot work. Starts nothing.

    Raises what preparing a run over a dataset raises; ConfigError for a model without a reward model's head, and UnsupportedError for a loss of
    something else than rewards, and for a model that transformers has no sequence classifier for.
    """
    table = resolved.config.reward_model
    run = prepare_data(
        resolved,
        progress,
        reading="steps" if table.labels == "steps" else "rewards",
        step_separator=table.step_separator,
        before_building=(_check_classifier,),
        after_building=(_refuse_no_rewards,),
    )
    if table.labels == "answers":
        _warn_of_padding(run.files)
    return run


def _check_classifier(resolved: ResolvedConfig) -> None:
    """Refuse a model that is not, or cannot be, a classifier with one label, or of steps with two."""
    from skyrl_engine.modeling.classifier import classifier_class

    model = resolved.config.model
    if not model.classifier:
        raise ConfigError(
            [
                Problem(
                    "model.classifier",
                    "is false, and a reward model is a classifier with one label",
                    'Set model.value_head = true and model.classifier = true, or reward_model.preset = "bradley_terry" or "steps"',
                )
            ]
        )
    if model.right_label is not None and resolved.config.reward_model.labels != "steps":
        raise ConfigError(
            [
                Problem(
                    "model.right_label",
                    "says which of two labels a right step has, and this run learns from pairs of answers",
                    'Remove it, or set reward_model.preset = "steps"',
                )
            ]
        )
    classifier_class(model)


def _refuse_no_rewards(draft: DataDraft) -> None:
    """Refuse parts that read anything of the model but values: the one token that carries loss says nothing."""
    objective = draft.assembly.objective
    for label, needs in objective.needs.items():
        unsupported_need = next((need for need in needs if model_score(need) not in (None, "values")), None)
        if unsupported_need is not None:
            raise UnsupportedError(
                f"{label} reads {unsupported_need!r} of the model, and a reward model has nothing but values",
                remedy='Set loss.use = "bradley_terry", or train on answers: trainer = "preference"',
            )
    of_steps = draft.resolved.config.reward_model.labels == "steps"
    if of_steps and not any(STEP_LABEL in part.product.needs for part in objective.losses):
        raise UnsupportedError(
            f"{objective.main.label} does not tell right from wrong steps, so it would value both alike",
            remedy='Set loss.use = "step_cross_entropy", or reward_model.labels = "answers"',
        )
    if of_steps:
        return
    if not any(ROLE_NEED in part.product.needs or part.on is not None for part in objective.losses):
        raise UnsupportedError(
            f"{objective.main.label} does not tell chosen from rejected answers, so it would value both alike",
            remedy='Set loss.use = "bradley_terry"',
        )


def _warn_of_padding(files: ModelFiles) -> None:
    tokenizer = files.tokenizer
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        logger.warning(
            "the tokenizer pads with its end-of-text token %r, which transformers leaves out at the end of a text: rewards are read at the "
            "token before it. Give the tokenizer a pad_token of its own to read them at the end",
            tokenizer.eos_token,
        )
