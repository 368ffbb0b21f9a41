"""The reference of a run: the frozen model that a policy is compared with, and what must not be different between the two."""

from typing import Final

from attrs import asdict

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import ReferenceConfig
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ConfigError, Problem, UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.training.frozen_model_compat import with_own_files

REFERENCE_MODEL: Final = "reference"
"""The frozen model's name on the ranks."""

REFERENCE: Final = "ref_logprobs"
"""The column of its log-probabilities."""


def plan_reference(resolved: ResolvedConfig, assembly: Assembly, files: ModelFiles) -> FrozenModel:
    """Choose the frozen model that `[reference]` asks for.

    Raises UnsupportedError for what the backend or the trained model does not allow and for another tokenizer, ModelError for a model that
    cannot be used.
    """
    table, trained = resolved.config.reference, resolved.config.model
    if table.refresh_every is not None and trained.lora is not None:
        raise UnsupportedError(
            "reference.refresh_every copies the whole trained model, and this run trains adapters",
            remedy="Remove reference.refresh_every, or train all weights",
        )
    planned = FrozenModel.choose(
        REFERENCE_MODEL,
        trained,
        assembly.description,
        table="reference",
        path=table.path,
        revision=table.revision,
        adapters_off=table.adapters_off,
    )
    if table.path is not None and planned.model is not None:
        planned, _ = with_own_files("the reference", "reference", planned, files)
    return planned


def refuse_unread_reference(resolved: ResolvedConfig) -> None:
    """Raise ConfigError with every key of `[reference]` that is set, where no part of the run reads a reference."""
    table, unset = resolved.config.reference, ReferenceConfig()
    problems = [
        Problem(
            f"reference.{key}",
            f"is set, and no part of the run reads {REFERENCE}, so that there is no reference",
            f"Remove reference.{key}, or add what compares with a reference, such as [rl.kl] or the loss term kl in trainer rl",
        )
        for key in asdict(table)
        if getattr(table, key) != getattr(unset, key)
    ]
    if problems:
        raise ConfigError(problems)


def refuse_dropout(facts: ModelFacts, otherwise: str) -> None:
    """Raise UnsupportedError for a model that is trained with dropout; `otherwise` says what else is done with it, and what would follow."""
    lora = facts.model.lora
    if lora is not None and lora.dropout > 0:
        name, share, remedy = "model.lora.dropout", lora.dropout, "Set model.lora.dropout = 0"
    elif dropout := next(iter(facts.dropouts.items()), None):
        (name, share), where = dropout, f"config.json of {facts.model.path}"
        name, remedy = f"{name} in {where}", f"Set {name} to 0 in {where}"
    else:
        return
    raise UnsupportedError(
        f"the model is trained with dropout ({name} is {share:g}), and {otherwise}",
        remedy=remedy,
    )
