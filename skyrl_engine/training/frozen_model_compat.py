"""A frozen model of its own next to the trained one, such as a teacher or a reference: both must mean the same tokens by the same numbers."""

from typing import Any, Final

from attrs import evolve

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ModelError, Refusals, UnsupportedError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.facts import ModelFacts


def plan_frozen_model(
    label: str,
    table: str,
    resolved: ResolvedConfig,
    assembly: Assembly,
    trained: ModelFiles,
    *,
    path: str,
    revision: str | None,
    own_tokens: bool = False,
) -> tuple[FrozenModel, ModelFiles]:
    """Choose the frozen model at `path`, which configuration table `table` names, and read its files; `label` names it in errors.

    `own_tokens` says that it may have a tokenizer of its own.

    Raises UnsupportedError for what the backend does not declare and for another tokenizer, ModelError for a model that cannot be used.
    """
    frozen = FrozenModel.choose(
        table, resolved.config.model, assembly.description, table=table, path=path, revision=revision, adapters_off=False
    )
    return with_own_files(label, table, frozen, trained, assembly.description, own_tokens=own_tokens)


def with_own_files(
    label: str,
    table: str,
    frozen: FrozenModel,
    trained: ModelFiles,
    description: BackendDescription,
    *,
    own_tokens: bool = False,
) -> tuple[FrozenModel, ModelFiles]:
    """Read the files of a frozen model that has a path of its own; its tokenizer is compared with that of the trained model.

    `description` is that of the backend, which may take no images. Raises UnsupportedError for another tokenizer, ModelError for a model that
    cannot be used.
    """
    assert frozen.model is not None, "a path names a model of its own"
    model = evolve(frozen.model, tokenizer=None, chat_template=None)
    refuse_unreadable(label, table, model, description)
    model_files = ModelFiles.of(model)
    if own_tokens and not model_files.tokenizer.is_fast:
        raise UnsupportedError(
            f"the tokenizer of {label} {model.path} does not tell where in a text its tokens stand, by which they are aligned",
            remedy=f"Set {table}.path to a model with a tokenizer.json",
        )
    if not own_tokens and (model.path, model.revision) != (trained.facts.model.path, trained.facts.model.revision):
        _refuse_other_tokens(label, table, model_files, trained)
    return evolve(frozen, model=model), model_files


def refuse_unreadable(label: str, table: str, model: ModelConfig, description: BackendDescription) -> None:
    """Raise ModelError for a model, which table `table` names and errors call `label`, whose configuration cannot be used, and
    UnsupportedError for a vision-language model that the backend of `description` does not load.
    """
    try:
        load_config(model, images="vision" in description.capabilities)
    except ModelError as error:
        raise ModelError(f"{label} cannot be used: {error.cause}", remedy=f"Correct {table}.path or {table}.revision") from error


_CALLED: Final = {"reference": "the reference", "teacher": "the teacher"}
"""Name of each table's model in errors."""


def refuse_blind_model(label: str, table: str, frozen: FrozenModel | None, *, images: bool) -> None:
    """Raise UnsupportedError for a frozen model of its own that takes no images, where the rows that it scores have some (`images`)."""
    if images and frozen is not None and frozen.model is not None and not ModelFacts(frozen.model).takes_images:
        raise UnsupportedError(
            f"the rows hold images, and {label} {frozen.model.path} takes none: it would read their tokens as words",
            remedy=f"Set {table}.path to a vision-language model, or train on rows of text",
        )


def check_models_beside(resolved: ResolvedConfig, refusals: Refusals) -> None:
    """Collect what speaks against the frozen models that the configuration names, as far as their own configurations tell."""
    config, backend = resolved.config, resolved.plugins["backend"]
    named: list[tuple[str, str, Any]] = [
        (label, table, getattr(config, table)) for table, label in _CALLED.items() if config.has(table)
    ]
    if config.has("rl"):
        named += [("the reward model", f"rl.reward_models[{place}]", table) for place, table in enumerate(config.rl.reward_models)]
    for label, table, values in named:
        if values.path is not None:
            with refusals.collect():
                model = evolve(
                    config.model, path=values.path, revision=values.revision, lora=None, tokenizer=None, chat_template=None
                )
                refuse_unreadable(label, table, model, backend.loaded.describe_backend(backend.options, config.run.ranks))


def _refuse_other_tokens(label: str, table: str, model_files: ModelFiles, trained: ModelFiles) -> None:
    """Refuse a tokenizer that means other tokens than the trained model's."""
    path = model_files.facts.model.path
    try:
        difference = find_other_tokens(model_files, trained)
    except ModelError as error:
        raise ModelError(
            f"{label} cannot be compared with the trained model: {error.cause}",
            remedy="Put the files of its tokenizer beside its weights",
        ) from error
    if difference is not None:
        raise UnsupportedError(
            f"{label} {path} {difference}", remedy=f"Set {table}.path to a model with the tokenizer of the trained one"
        )


def find_other_tokens(model_files: ModelFiles, trained: ModelFiles) -> str | None:
    """Say how a model's tokens differ from the trained model's, as the rest of a sentence; None where each of these has its number there.

    Rows of an embedding after the tokenizer's last token are padding, and may differ. Raises ModelError for a tokenizer that cannot be read.
    """
    theirs, ours = model_files.tokenizer.get_vocab(), trained.tokenizer.get_vocab()
    token = min((token for token, number in ours.items() if theirs.get(token) != number), key=ours.__getitem__, default=None)
    if token is not None:
        return (
            f"has another tokenizer than the trained model: the token {token!r} is number {ours[token]} of the one and "
            f"{theirs.get(token, 'none')} of the other"
        )
    known, needed = model_files.facts.vocabulary_size, trained.facts.vocabulary_size
    if known is not None and needed is not None and known < needed:
        return f"knows {known:,} tokens, and the trained model {needed:,}"
    return None
