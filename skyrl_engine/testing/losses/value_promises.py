"""Promises of a loss about its result: one finite, differentiable value per token, metrics that add up, and nothing kept alive."""

import gc
import math
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from skyrl_engine.contracts.kinds.loss import as_loss_output
from skyrl_engine.contracts.values.outputs import Metric, combine_metrics
from skyrl_engine.errors import DetachedLossError, EngineError, ResultError
from skyrl_engine.testing.comparison import describe_change, is_same
from skyrl_engine.testing.losses.kind import LOSS, batch_local
from skyrl_engine.testing.promise import Broken, Undecidable, any_of, promise
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import explicit
from skyrl_engine.testing.tokens.evaluation import Listening
from skyrl_engine.testing.tokens.kind import draw_anything, draw_cuts, draw_ordinary, list_anything, list_cuts, needs_of
from skyrl_engine.testing.tokens.token_batches import CutBatch, TokenBatch


@promise(
    "It returns one finite value per token, also where a probability is 1, near 0, or far from the old policy's",
    cases=draw_anything,
    first=list_anything,
)
def one_finite_value_per_token(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        result = LOSS.evaluate_subject(subject, batch, dtype=torch.float32, gradients=False)
    except ResultError as refused:
        raise Broken(refused.cause, refused.remedy) from refused
    except EngineError as error:
        raise Undecidable(error.cause) from error
    wrong = ~np.isfinite(result.per_token)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise Broken(
            f"the loss of token {place} is {result.per_token[place]}",
            "Guard divisions and logarithms, and clamp what goes into exp()",
        )


@promise("Its values depend on the model's scores, with a finite gradient", cases=draw_anything, first=list_anything)
def differentiable(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        result = LOSS.evaluate_subject(subject, batch, dtype=torch.float32)
    except DetachedLossError as detached:
        raise Broken("nothing would be learned: its values do not depend on the model", detached.remedy) from detached
    except EngineError as error:
        raise Undecidable(error.cause) from error
    if not np.isfinite(result.per_token).all():
        raise Undecidable("the loss is not finite")
    for name, gradient in result.gradients.items():
        wrong = ~np.isfinite(gradient)
        if wrong.any():
            raise Broken(
                f"the gradient by {name} at token {int(np.argmax(wrong))} is {gradient[np.argmax(wrong)]} although the loss is finite",
                "Keep infinite branches out of torch.where: clamp their input first",
            )


@promise("It learns: in a batch with a little of everything, not every gradient is 0")
def learns(subject: Subject[Any], _case: None) -> None:
    result = LOSS.evaluate_or_undecidable(subject, explicit.make_varied_batch(needs_of(subject)))
    if not any(gradient.any() for gradient in result.gradients.values()):
        raise Broken(
            "nothing would be learned: every gradient is 0 although its values seem to depend on the model",
            "Look for detach(), for a factor of 0, and for bounds that leave no token between them",
        )


def _exempt_without_metrics(subject: Subject[Any]) -> str | None:
    return None if _metric_names(subject) else "the loss reports no metrics"


def _metric_names(subject: Subject[Any]) -> set[str]:
    """Return the names of all metrics that it reports for one token or several: some make sense of several alone."""
    names: set[str] = set()
    for make in (explicit.one_token, explicit.make_varied_batch, explicit.make_threes):
        with suppress(EngineError):
            names |= LOSS.evaluate_subject(subject, make(needs_of(subject))).metrics.keys()
    return names


@promise(
    "Its metrics over micro-batches add up to those of the whole, as their reductions say",
    cases=draw_cuts,
    exempt=any_of(batch_local, _exempt_without_metrics),
    first=list_cuts,
)
def metrics(subject: Subject[Any], case: CutBatch) -> None:
    whole = LOSS.evaluate_or_undecidable(subject, case.batch).metrics
    parts = combine_metrics([LOSS.evaluate_or_undecidable(subject, case.batch.take(part)).metrics for part in case.parts])
    for name in sorted(whole.keys() ^ parts.keys()):
        here, there = ("the whole", "its micro-batches") if name in whole else ("its micro-batches", "the whole")
        raise Broken(f"the metric {name!r} of {here} is missing in {there}", "Report it in every call that has tokens")
    for name, metric in whole.items():
        one, other = metric.result, parts[name].result
        if not is_same(np.array([one]), np.array([other])):
            raise Broken(
                f"the metric {name!r} is {one:.6g} over the whole and {other:.6g} over its micro-batches: {_cause_of_metric(metric)}",
                "Report a mean as its sum and its count (Metric.mean(values.sum(), len(values)))",
                factor=other / one if one else None,
            )


@promise(
    "A micro-batch without tokens, as those that fill up ranks, changes none of its metrics",
    cases=draw_ordinary,
    effort=0.5,
    exempt=_exempt_without_metrics,
    first=lambda subject: [explicit.make_threes(needs_of(subject))],
)
def empty_metrics(subject: Subject[Any], batch: TokenBatch) -> None:
    alone = LOSS.evaluate_or_undecidable(subject, batch).metrics
    for filler in explicit.fillers(batch):
        filled = combine_metrics([alone, LOSS.evaluate_or_undecidable(subject, filler).metrics])
        for name, metric in filled.items():
            before = alone[name].result if name in alone else math.nan
            if not is_same(np.array([before]), np.array([metric.result])):
                raise Broken(
                    f"the metric {name!r} is {before:.6g}, and {metric.result:.6g} with a rank that has no tokens: "
                    f"{_cause_of_filler(metric)}",
                    "Report a mean by Metric.mean(values.sum(), len(values)), and no least or largest value of nothing",
                )


def _cause_of_filler(metric: Metric) -> str:
    if metric.reduction == "mean":
        return "without tokens it reports a count other than 0"
    return f"without tokens it reports a number that counts in the {metric.reduction}"


@promise(
    "Evaluation measures what training does: values and metrics are the same where no gradient is asked for",
    cases=draw_ordinary,
    effort=0.5,
)
def evaluation(subject: Subject[Any], batch: TokenBatch) -> None:
    training = LOSS.evaluate_or_undecidable(subject, batch)
    remedy = "Let values depend on its tokens alone, not on requires_grad or torch.is_grad_enabled()"
    try:
        with torch.no_grad():
            scoring = LOSS.evaluate_subject(subject, batch, gradients=False)
    except EngineError as error:
        raise Broken(f"fails where no gradient is asked for, as in evaluation: {error.cause}", remedy) from error
    one, other = ({name: metric.result for name, metric in result.metrics.items()} for result in (training, scoring))
    same_metrics = one.keys() == other.keys() and is_same(np.array([*one.values()]), np.array([other[name] for name in one]))
    same_values = is_same(training.per_token, scoring.per_token)
    if same_values and same_metrics:
        return
    LOSS.require_repeatable(subject, batch)
    how, factor = describe_change("loss", training.per_token, scoring.per_token)
    if same_values:
        how = f"reports the metrics {other} and not {one}"
    raise Broken(f"{how} where no gradient is asked for, as in evaluation", remedy, factor=factor)


def _cause_of_metric(metric: Metric) -> str:
    if metric.reduction == "mean" and metric.count == 1:
        return "it is a mean of means, each of which counts alike whatever it was taken over"
    return f"parts of it do not combine by {metric.reduction}"


@promise("It keeps no tensor of a micro-batch alive, and no more of its own after every call", cases=draw_ordinary, effort=0.1)
def memory(subject: Subject[Any], batch: TokenBatch) -> None:
    loss = subject.make()
    listening = Listening(loss)
    LOSS.evaluate_or_undecidable(subject, batch, listening)
    output = as_loss_output(subject.label, listening.heard["output"], batch.tokens)
    references = {"its values": weakref.ref(output.token_loss)}
    references |= {name: weakref.ref(tensor) for name, tensor in listening.heard["tokens"].needs.items()}
    del listening, output
    gc.collect()
    remedy = "Store numbers (tensor.item()), not tensors"
    for name, reference in references.items():
        if reference() is not None:
            raise Broken(f"keeps {name} after the call, and with it all that the model computed for the micro-batch", remedy)
    if (left := _count_kept_tensors(subject, batch, loss)) >= _CALLS:
        raise Broken(f"keeps tensors: {_CALLS} calls leave {left} more than there were before, so that memory runs out", remedy)


_CALLS = 3


def _count_kept_tensors(subject: Subject[Any], batch: TokenBatch, loss: Any) -> int:
    """Return how many tensors are there after some calls for the same micro-batch that were not there before."""
    gc.collect()
    gc.freeze()  # leaves what exists out of get_objects
    try:
        for _ in range(_CALLS):
            LOSS.evaluate_or_undecidable(subject, batch, loss)
        gc.collect()
        return sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects())
    finally:
        gc.unfreeze()
