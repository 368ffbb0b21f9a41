"""What must hold of every loss: what it returns."""

import math
from typing import Any

import numpy as np
import torch

from skyrl_engine.errors import EngineError
from skyrl_engine.testing.comparison import (
    factor_between,
    same,
)
from skyrl_engine.testing.losses.cases import anything, decided_evaluation, needs_of, some_long
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, promise
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import rollouts
from skyrl_engine.testing.tokens.evaluation import Listening, decided, evaluate, undeclared
from skyrl_engine.testing.tokens.rollouts import TokenBatch


@promise("It answers every batch, of which it reads only what it declares in needs", cases=anything)
def needs(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        evaluate(subject.label, subject.make(), batch, dtype=torch.float32)
    except EngineError as error:
        if undeclared(error):
            raise Broken(f"reads what it does not declare: {error.__cause__}", "Add the name to its needs") from error
        if _about_values(error):
            raise Undecidable(error.cause) from error
        raise Broken(error.cause, error.remedy) from error


def _about_values(error: EngineError) -> bool:
    return "returned" in error.cause


@promise(
    "It returns one finite value per token, also where a probability is 1, near 0, or far from the old policy's", cases=anything
)
def one_finite_value_per_token(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        made = evaluate(subject.label, subject.make(), batch, dtype=torch.float32, gradients=False)
    except EngineError as error:
        if _about_values(error):
            raise Broken(error.cause, error.remedy) from error
        raise Undecidable(error.cause) from error
    wrong = ~np.isfinite(made.token_loss)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise Broken(
            f"the loss of token {place} is {made.token_loss[place]}",
            "Guard divisions and logarithms, and clamp what goes into exp()",
        )


@promise("Its values depend on the model's scores, with a finite gradient", cases=anything)
def differentiable(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        made = evaluate(subject.label, subject.make(), batch, dtype=torch.float32)
    except EngineError as error:
        if "do not depend on the model" in error.cause:
            raise Broken("nothing would be learned: its values do not depend on the model", error.remedy) from error
        raise Undecidable(error.cause) from error
    if not np.isfinite(made.token_loss).all():
        raise Undecidable("the loss is not finite")
    for name, gradient in made.gradients.items():
        wrong = ~np.isfinite(gradient)
        if wrong.any():
            raise Broken(
                f"the gradient by {name} at token {int(np.argmax(wrong))} is {gradient[np.argmax(wrong)]} although the loss is finite",
                "Keep infinite branches out of torch.where: clamp their input first",
            )


@promise("It learns: in a batch with a little of everything, not every gradient is 0")
def learns(subject: Subject[Any], _case: None) -> None:
    made = decided_evaluation(subject, rollouts.varied(needs_of(subject)))
    if not any(gradient.any() for gradient in made.gradients.values()):
        raise Broken(
            "nothing would be learned: every gradient is 0 although its values seem to depend on the model",
            "Look for detach(), for a factor of 0, and for bounds that leave no token between them",
        )


@promise(
    "A micro-batch without any loss-carrying token has a loss of 0 and breaks nothing",
    cases=lambda subject: rollouts.masked_batches(needs_of(subject)),
)
def all_masked(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        made = evaluate(subject.label, subject.make(), batch, dtype=torch.float32)
    except EngineError as error:
        decided_evaluation(subject, rollouts.one_token(needs_of(subject)))  # what fails with a token as well is another promise's
        raise Broken(f"fails without a token: {error.cause}", "Let it return an empty tensor for n = 0") from error
    if made.total != 0:
        raise Broken(f"the loss of no token is {made.total}", "Return an empty tensor for n = 0")
    for name, metric in made.metrics.items():
        if math.isnan(metric.value) or math.isnan(metric.count):
            raise Broken(
                f"the metric {name!r} is NaN without a token, and stays so in the sum over all micro-batches",
                "Report a mean as its sum and its count (Metric.mean(values.sum(), len(values)))",
            )


def _has_no_oracle(subject: Subject[Any]) -> str | None:
    return None if "oracle" in subject.hooks else "there is no oracle to compare with"


@promise("Its values are those of the oracle", cases=some_long, exempt=_has_no_oracle)
def oracle(subject: Subject[Any], batch: TokenBatch) -> None:
    loss = Listening(subject.make())
    made = decided(subject.label, loss, batch)
    due = np.asarray(torch.as_tensor(subject.hooks["oracle"](loss.heard["tokens"])).detach().double())
    if due.shape != made.token_loss.shape:
        raise Broken(
            f"the oracle gives shape {list(due.shape)} for {batch.tokens} tokens", "Let the oracle give one value per token"
        )
    if not same(made.token_loss, due):
        factor = factor_between(due, made.token_loss)
        place = int(np.argmax(~np.isclose(made.token_loss, due)))
        cause = (
            "the sign is turned around"
            if factor is not None and factor < 0
            else f"token {place} has {made.token_loss[place]:.6g}, not {due[place]:.6g}"
        )
        raise Broken(
            f"is {'not' if factor is None else f'x{factor:.2f}'} what the oracle gives: {cause}",
            "Compare formula and code",
            factor=factor,
        )


VALUE_PROMISES: tuple[Promise[Any, Any], ...] = (
    needs,
    one_finite_value_per_token,
    differentiable,
    learns,
    oracle,
    all_masked,
)
