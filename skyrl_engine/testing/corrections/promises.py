"""Promises of every correction: finite factors without gradient, equal for every cut of the batch and every neighbour."""

from typing import Any

import numpy as np
import torch

from skyrl_engine.errors import EngineError, ResultError
from skyrl_engine.testing.another_process import another_process
from skyrl_engine.testing.comparison import is_same
from skyrl_engine.testing.corrections.evaluation import evaluate, tokens_for_correction
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, promise
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import explicit, rollouts
from skyrl_engine.testing.tokens import promises as shared
from skyrl_engine.testing.tokens.kind import TokenKind, draw_anything, draw_ordinary, draw_some_long, list_anything, needs_of
from skyrl_engine.testing.tokens.lossy_casts import LossyCasts
from skyrl_engine.testing.tokens.oracle import oracle
from skyrl_engine.testing.tokens.token_batches import TokenBatch


def _exempt_random(subject: Subject[Any]) -> str | None:
    """Return the reason why a subject does not claim promises about cuts, None if it does."""
    try:
        evaluation = evaluate(subject.label, subject.make(), explicit.make_threes(needs_of(subject)))
    except EngineError:
        return None  # other promises report failures
    return (
        "the correction draws from tokens.generator: which numbers a token gets depends on the cut by nature"
        if evaluation.drew
        else None
    )


CORRECTION = TokenKind(
    evaluate,
    noun="factor",
    results="factors",
    products="corrections",
    batch_local=_exempt_random,
    remedy="Take means and products within a sequence (tokens.sequences), and no statistics of the batch",
)


def _answer(subject: Subject[Any], batch: TokenBatch) -> object:
    return CORRECTION.evaluate_or_undecidable(subject, batch).bits


@promise(
    "It returns one finite factor of 0 or more per token, also for ratios of e^100",
    cases=draw_anything,
    effort=4.0,
    first=list_anything,
)
def finite_factors(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        CORRECTION.evaluate_subject(subject, batch, dtype=torch.float32)
    except ResultError as refused:
        raise Broken(refused.cause, f"{refused.remedy}; clamp what goes into exp()") from refused
    except EngineError as error:
        raise Undecidable(error.cause) from error


@promise("Its factors carry no gradient", cases=draw_ordinary)
def detached(subject: Subject[Any], batch: TokenBatch) -> None:
    correction = subject.make()
    try:
        factors = correction(tokens_for_correction(subject.label, correction, batch))
    except Exception as error:
        raise Undecidable(f"it fails: {error}") from error
    if isinstance(factors, torch.Tensor) and factors.requires_grad:
        raise Broken("its factors require a gradient although nothing it was given does", "Return made.detach()")


@promise(
    "It computes in the precision of its input: float32 is within 1e-4 of float64, and nothing is cast to less",
    cases=draw_some_long,
)
def precision(subject: Subject[Any], batch: TokenBatch) -> None:
    casts = LossyCasts()
    exact = CORRECTION.evaluate_or_undecidable(subject, batch, mode=casts)
    if casts.cause is not None:
        raise Broken(casts.cause, "Leave dtypes as they come, or cast to the dtype of tokens.old_logprobs")
    if exact.drew or batch.lengths.max(initial=0) >= rollouts.LONG:
        return  # other numbers are drawn in other dtypes, and sums over many tokens may leave float32: nothing to compare
    single, due = CORRECTION.evaluate_or_undecidable(subject, batch, dtype=torch.float32).per_token, exact.per_token
    if not is_same(due, single, relative=1e-4, absolute=1e-4):
        worst = int(np.argmax(np.abs(due - single)))
        raise Broken(
            f"loses precision: token {worst} has the factor {single[worst]:.6g} in float32 and {due[worst]:.6g} in float64",
            "Cast nothing to half precision, and subtract logarithms before exp()",
        )


CORRECTION_PROMISES: tuple[Promise[Any, Any], ...] = (
    shared.process_settings.of(CORRECTION),  # first: once set they are set
    shared.replicas.of(CORRECTION),  # soon: what wears off after some calls is seen while it lasts
    shared.needs.of(CORRECTION),
    finite_factors,
    detached,
    oracle.of(CORRECTION),
    shared.micro_batch_split.of(CORRECTION),
    shared.rank_split.of(CORRECTION),
    shared.sample_order.of(CORRECTION),
    shared.labels.of(CORRECTION),
    shared.padding.of(CORRECTION),
    shared.all_masked.of(CORRECTION),
    shared.packing.of(CORRECTION),
    precision,
    shared.devices.of(CORRECTION),
    shared.global_random_numbers.of(CORRECTION),
    shared.inputs_unchanged.of(CORRECTION),
    another_process(_answer, list_anything),  # late: it takes seconds to start
    *PLUGIN_PROMISES,
)
