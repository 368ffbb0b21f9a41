"""Refusals of what a caller asks of an engine, before a rank meets it."""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

import numpy as np

from skyrl_engine.contracts.kinds.backend import OPTIONAL_SCORES
from skyrl_engine.contracts.kinds.needs import LOGPROBS_AT, TEACHER_MODEL, asks_a_teacher
from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.errors import ConfigError, DataError, Problem, UnsupportedError
from skyrl_engine.workers.scored_tokens import Selection


@contextmanager
def name_call_in_errors(call: str) -> Iterator[None]:
    """Name the call whose numbers are refused."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigError([Problem(call, str(error.args[0]), "Give a number within this bound")]) from error


def refuse_foreign_numbers(settings: OptimizerSettings, numbers: Iterable[str]) -> None:
    """Raise UnsupportedError for a number of a step that the optimizer of `settings` does not have."""
    for name in numbers:
        if not hasattr(settings, name):
            raise UnsupportedError(
                f"optim_step is given {name}, which the optimizer {settings.use} does not have",
                remedy=f'Leave {name} out, or set optimizer.use = "adamw"',
            )


def refuse_unknown_tokens(columns: SampleColumns, vocabulary: int | None) -> None:
    """Raise DataError for a token outside of the vocabulary (None: nobody knows it).

    A rank that met it alone would leave the others waiting.
    """
    ids = columns.input_ids
    if vocabulary is None or 0 <= int(ids.min(initial=0)) <= int(ids.max(initial=0)) < vocabulary:
        return
    place = int(np.argmax((ids < 0) | (ids >= vocabulary)))
    _refuse_token(columns, columns.token_offsets, place, int(ids[place]), vocabulary, "input_ids")


def labels_in(columns: SampleColumns, labels: str | None, tokens: Selection, vocabulary: int | None) -> tuple[str, ...]:
    """Return the column of labels, if there is one.

    Raises DataError where it holds other than one token id per token, and for an id outside of the vocabulary (None: nobody knows it) at one
    of the `tokens` that are scored.
    """
    if labels is None:
        return ()
    values = columns.columns.get(labels)
    if values is None or values.dtype != np.int64 or values.shape[1:] != (1,):
        matches = (
            "there is no such column"
            if values is None
            else f"the column is {values.dtype}[A{''.join(f', {k}' for k in values.shape[1:])}]"
        )
        raise DataError(
            f"labels = {labels!r} names no column of one token id per token: {matches}",
            remedy="Give a column int64[A, 1] of token ids",
        )
    ids = values[:, 0]
    if vocabulary is not None:
        wrong = (ids < 0) | (ids >= vocabulary)
        if tokens == "loss":
            wrong &= columns.loss_weight != 0
        if wrong.any():
            place = int(np.argmax(wrong))
            _refuse_token(columns, columns.action_offsets, place, int(ids[place]), vocabulary, labels)
    return (labels,)


def refuse_scores(scores: AbstractSet[str], assembly: Assembly, *, value_head: bool) -> None:
    """Raise UnsupportedError for scores that a model, the trained or a frozen one, does not compute."""
    # per-token outputs are one number per token, so candidates are for losses alone
    has = {"logprobs", "entropy"} | ({*OPTIONAL_SCORES} & assembly.description.capabilities) - {LOGPROBS_AT}
    if value_head:
        has |= {"values"}
    if not scores or not scores <= has:
        raise UnsupportedError(
            f"the model does not give the scores {', '.join(sorted(scores - has)) or 'of no name'}",
            remedy=f"Ask for some of {', '.join(sorted(has))}; values need model.value_head = true",
        )


def refuse_no_teacher(assembly: Assembly, frozen: AbstractSet[str]) -> None:
    """Raise UnsupportedError for a loss that compares with a teacher, where none is among the frozen models."""
    if asks_a_teacher(assembly.objective.scores) and TEACHER_MODEL not in frozen:
        raise UnsupportedError(
            "a part of the loss compares the model with a teacher on the ranks, and there is none",
            remedy=f'Add it first: engine.add_frozen(FrozenModel("{TEACHER_MODEL}", model))',
        )


def has_adapter_sets(assembly: Assembly, model: ModelConfig) -> bool:
    """Say whether further sets of adapters can be trained in addition to those of a model."""
    # codes of 4 bits are no parameters, which sets would share
    shares = model.lora is not None and not model.lora.load_in_4bit
    return shares and "adapter_sets" in assembly.description.capabilities


def refuse_no_adapter_sets(assembly: Assembly, model: ModelConfig) -> None:
    """Raise UnsupportedError for a model without adapters, and for a backend without sets of them."""
    if not has_adapter_sets(assembly, model):
        backend = assembly.plugins["backend"].loaded.record.name
        raise UnsupportedError(
            f"sets of adapters need a model with adapters and the capability 'adapter_sets', which backend {backend} must declare",
            remedy="Set model.lora, without load_in_4bit, and choose a backend and a layout that declare it, such as fsdp",
        )


def _refuse_token(columns: SampleColumns, offsets: IntArray, place: int, token: int, vocabulary: int, name: str) -> None:
    row = int(np.searchsorted(offsets, place, side="right")) - 1
    raise DataError(
        f"sample {int(columns.sample_ids[row])} holds the token id {token} in {name}, at place {place - int(offsets[row])}, and the model's "
        f"vocabulary has {vocabulary:,}",
        remedy="Use the tokenizer that belongs to the model",
    )
