"""Promises of a loss about its result: one finite, differentiable value per token, metrics that add up, and nothing kept alive."""

import gc
import weakref
from typing import Any

import numpy as np
import torch

from skyrl_engine.contracts.kinds.loss import as_loss_output
from skyrl_engine.contracts.values.outputs import Metric, combine_metrics
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.comparison import factor_between, same
from skyrl_engine.testing.losses.kind import LOSS, batch_local, some_long
from skyrl_engine.testing.promise import Broken, Undecidable, any_of, promise
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import rollouts
from skyrl_engine.testing.tokens.evaluation import Listening
from skyrl_engine.testing.tokens.kind import anything, cuts, needs_of, ordinary
from skyrl_engine.testing.tokens.promises import refuses_what_was_returned
from skyrl_engine.testing.tokens.rollouts import CutBatch, TokenBatch


@promise(
    "It returns one finite value per token, also where a probability is 1, near 0, or far from the old policy's", cases=anything
)
def one_finite_value_per_token(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        made = LOSS.evaluated(subject, batch, dtype=torch.float32, gradients=False)
    except EngineError as error:
        if refuses_what_was_returned(error):
            raise Broken(error.cause, error.remedy) from error
        raise Undecidable(error.cause) from error
    wrong = ~np.isfinite(made.per_token)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise Broken(
            f"the loss of token {place} is {made.per_token[place]}",
            "Guard divisions and logarithms, and clamp what goes into exp()",
        )


@promise("Its values depend on the model's scores, with a finite gradient", cases=anything)
def differentiable(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        made = LOSS.evaluated(subject, batch, dtype=torch.float32)
    except EngineError as error:
        if "do not depend on the model" in error.cause:
            raise Broken("nothing would be learned: its values do not depend on the model", error.remedy) from error
        raise Undecidable(error.cause) from error
    if not np.isfinite(made.per_token).all():
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
    made = LOSS.decided(subject, rollouts.varied(needs_of(subject)))
    if not any(gradient.any() for gradient in made.gradients.values()):
        raise Broken(
            "nothing would be learned: every gradient is 0 although its values seem to depend on the model",
            "Look for detach(), for a factor of 0, and for bounds that leave no token between them",
        )


def _has_no_oracle(subject: Subject[Any]) -> str | None:
    return None if "oracle" in subject.hooks else "there is no oracle to compare with"


@promise("Its values are those of the oracle", cases=some_long, exempt=_has_no_oracle)
def oracle(subject: Subject[Any], batch: TokenBatch) -> None:
    loss = Listening(subject.make())
    made = LOSS.decided(subject, batch, loss)
    due = np.asarray(torch.as_tensor(subject.hooks["oracle"](loss.heard["tokens"])).detach().double())
    if due.shape != made.per_token.shape:
        raise Broken(
            f"the oracle gives shape {list(due.shape)} for {batch.tokens} tokens", "Let the oracle give one value per token"
        )
    if not same(made.per_token, due):
        factor = factor_between(due, made.per_token)
        place = int(np.argmax(~np.isclose(made.per_token, due)))
        cause = (
            "the sign is turned around"
            if factor is not None and factor < 0
            else f"token {place} has {made.per_token[place]:.6g}, not {due[place]:.6g}"
        )
        raise Broken(
            f"is {'not' if factor is None else f'x{factor:.2f}'} what the oracle gives: {cause}",
            "Compare formula and code",
            factor=factor,
        )


def _metrics_are_cut(subject: Subject[Any]) -> str | None:
    return None if _metric_names(subject) else "the loss reports no metrics"


def _metric_names(subject: Subject[Any]) -> set[str]:
    try:
        return set(LOSS.evaluated(subject, rollouts.one_token(needs_of(subject))).metrics)
    except EngineError:
        return set()


@promise(
    "Its metrics over micro-batches add up to those of the whole, as their reductions say",
    cases=cuts,
    exempt=any_of(batch_local, _metrics_are_cut),
)
def metrics(subject: Subject[Any], case: CutBatch) -> None:
    whole = LOSS.decided(subject, case.batch).metrics
    parts = combine_metrics([LOSS.decided(subject, case.batch.take(part)).metrics for part in case.parts])
    for name, metric in whole.items():
        if name not in parts:
            raise Broken(f"the metric {name!r} of the whole is missing in its micro-batches", "Report it in every call")
        one, other = metric.result, parts[name].result
        if not same(np.array([one]), np.array([other])):
            raise Broken(
                f"the metric {name!r} is {one:.6g} over the whole and {other:.6g} over its micro-batches: {_cause_of_metric(metric)}",
                "Report a mean as its sum and its count (Metric.mean(values.sum(), len(values)))",
                factor=other / one if one else None,
            )


def _cause_of_metric(metric: Metric) -> str:
    if metric.reduction == "mean" and metric.count == 1:
        return "it is a mean of means, each of which counts alike whatever it was taken over"
    return f"parts of it do not combine by {metric.reduction}"


@promise("It keeps no tensor of a micro-batch alive", cases=ordinary, effort=0.1)
def memory(subject: Subject[Any], batch: TokenBatch) -> None:
    loss = subject.make()
    listening = Listening(loss)
    LOSS.decided(subject, batch, listening)
    output = as_loss_output(subject.label, listening.heard["output"], batch.tokens)
    kept = {"its values": weakref.ref(output.token_loss)}
    kept |= {name: weakref.ref(tensor) for name, tensor in listening.heard["tokens"].needs.items()}
    del listening, output
    gc.collect()
    for name, reference in kept.items():
        if reference() is not None:
            raise Broken(
                f"keeps {name} after the call, and with it all that the model computed for the micro-batch",
                "Store numbers (tensor.item()), not tensors",
            )
