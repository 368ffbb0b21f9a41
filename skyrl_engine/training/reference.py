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
    cannot be used, ConfigError for a share of weights that are never mixed.
    """
    table, trained = resolved.config.reference, resolved.config.model
    if table.refresh_every is not None and trained.lora is not None:
        raise UnsupportedError(
            "reference.refresh_every copies the whole trained model, and this run trains adapters",
            remedy="Remove reference.refresh_every, or train all weights",
        )
    if table.mixup != 1 and table.refresh_every is None:
        raise ConfigError(
            [
                Problem(
                    "reference.mixup",
                    "is set, and reference.refresh_every says at no step to mix",
                    "Set reference.refresh_every, or remove reference.mixup",
                )
            ]
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
        planned, _ = with_own_files("the reference", "reference", planned, files, assembly.description)
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
    """Raise UnsupportedError with every share of a model that is trained with dropout, or for one that is trained with noise.

    `otherwise` says what else is done with the model, and what would follow.
    """
    lora, remedies = facts.model.lora, []
    shares = [f"{name} {share:g}" for name, share in facts.dropouts.items()]
    if shares:
        shares[-1] += f" in config.json of {facts.model.path}"
        remedies.append('model.dropout = "off"')
    if lora is not None and lora.dropout > 0:
        shares.append(f"model.lora.dropout {lora.dropout:g}")
        remedies.append("model.lora.dropout = 0")
    if shares:
        raise UnsupportedError(
            f"the model is trained with dropout ({', '.join(shares)}), and {otherwise}", remedy=f"Set {' and '.join(remedies)}"
        )
    if (alpha := facts.model.neftune_alpha) is not None:
        raise UnsupportedError(
            f"the model is trained with noise (model.neftune_alpha {alpha:g}), and {otherwise}", remedy="Remove model.neftune_alpha"
        )
