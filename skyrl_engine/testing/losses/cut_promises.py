"""What must hold of every loss: how a batch is cut changes nothing. Compared after the objective: total, gradients by every score, and
token losses, in float64.
"""

from typing import Any

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.values.outputs import Metric, combine_metrics
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.comparison import (
    cause_of_ratio,
    change,
    constant_within,
    require_same,
    same,
    same_evaluation,
)
from skyrl_engine.testing.losses.cases import (
    BY_NATURE,
    PLAIN_VALUES,
    batch_local,
    cuts,
    decided_evaluation,
    needs_of,
    unless_random,
)
from skyrl_engine.testing.promise import Broken, Promise, any_of, promise
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import rollouts
from skyrl_engine.testing.tokens.evaluation import Evaluation, decided, evaluate, joined
from skyrl_engine.testing.tokens.rollouts import CutBatch, FilledBatch, RelabelledBatch, ReorderedBatch, WornBatch


@promise("A batch cut into micro-batches has the loss and the gradient of the whole", cases=cuts, exempt=batch_local)
def micro_batch_split(subject: Subject[Any], case: CutBatch) -> None:
    whole = decided_evaluation(subject, case.batch)
    parts = joined(case, [decided_evaluation(subject, case.batch.take(part)) for part in case.parts])
    if same_evaluation(whole, parts):
        return
    unless_random(subject, case.batch)
    how, factor = change(whole, parts)
    count = {2: "two", 3: "three"}[len(case.parts)]
    raise Broken(f"{how} under {count} micro-batches: {_cause_of_cut(case, whole, parts)}", PLAIN_VALUES + BY_NATURE, factor=factor)


def _cause_of_cut(case: CutBatch, whole: Evaluation, parts: Evaluation) -> str:
    batch = case.batch
    own_tokens, own_sequences, part_of = (np.zeros(batch.tokens) for _ in range(3))
    for number, part in enumerate(case.parts):
        at = batch.places(part)
        own_tokens[at], own_sequences[at], part_of[at] = len(at), len(part), number
    candidates = {
        "it divides by its own mask, the number of tokens in its micro-batch": batch.tokens / own_tokens,
        "it divides by the number of sequences in its micro-batch": len(batch) / own_sequences,
        "it multiplies by the number of tokens in its micro-batch": own_tokens / batch.tokens,
        "it multiplies by the number of sequences in its micro-batch": own_sequences / len(batch),
    }
    cause = cause_of_ratio(whole.token_loss, parts.token_loss, candidates)
    if cause is None and constant_within(parts.token_loss - whole.token_loss, part_of.astype(np.int64)):
        cause = "it subtracts or adds something that it takes over its micro-batch"
    return cause or "it depends on which samples share its micro-batch"


@promise(
    "It remembers nothing between micro-batches: the ranks that compute them have losses of their own",
    cases=lambda subject: rollouts.worn_batches(needs_of(subject)),
)
def rank_split(subject: Subject[Any], worn: WornBatch) -> None:
    case = worn.cut
    one_rank = subject.make()
    for call in range(worn.calls):
        part = case.parts[call % len(case.parts)]
        decided(subject.label, one_rank, case.batch.take(part), gradients=False)
    together = joined(case, [decided(subject.label, one_rank, case.batch.take(part)) for part in case.parts])
    apart = joined(case, [decided_evaluation(subject, case.batch.take(part)) for part in case.parts])
    if not same_evaluation(together, apart):
        unless_random(subject, case.batch)
    require_same(
        together,
        apart,
        f"where {len(case.parts)} ranks compute what one rank did",
        "it keeps something from one call to the next",
        "Make it a function of its tokens; what lasts longer belongs into a column of the data",
    )


@promise(
    "The order of the samples changes nothing",
    cases=lambda subject: rollouts.reordered_batches(needs_of(subject)),
    exempt=batch_local,
)
def sample_order(subject: Subject[Any], case: ReorderedBatch) -> None:
    whole = decided_evaluation(subject, case.batch)
    moved = joined(CutBatch(case.batch, (case.order,)), [decided_evaluation(subject, case.batch.take(case.order))])
    if not same_evaluation(whole, moved):
        unless_random(subject, case.batch)
    require_same(
        whole, moved, "in another order of samples", "it depends on the place of a token among the n", PLAIN_VALUES + BY_NATURE
    )


@promise(
    "What groups and units are called changes nothing",
    cases=lambda subject: rollouts.relabelled_batches(needs_of(subject)),
)
def labels(subject: Subject[Any], case: RelabelledBatch) -> None:
    plain = decided_evaluation(subject, case.batch)
    remedy = "Number labels with torch.unique(..., return_inverse=True), and take no id for a place"
    try:
        renamed = evaluate(subject.label, subject.make(), case.relabelled)
    except EngineError as error:
        raise Broken(f"fails where labels are other numbers: {error.cause}", remedy) from error
    if not same_evaluation(plain, renamed):
        unless_random(subject, case.batch)
    require_same(plain, renamed, "with other labels", "it takes an id for a number", remedy)


@promise(
    "Sequences without loss, and the empty micro-batches that fill up ranks, change nothing",
    cases=lambda subject: rollouts.filled_batches(needs_of(subject)),
    exempt=batch_local,
)
def padding(subject: Subject[Any], case: FilledBatch) -> None:
    whole = decided_evaluation(subject, case.batch)
    try:
        filled = evaluate(subject.label, subject.make(), case.filled)
    except EngineError as error:
        raise Broken(f"fails beside a sequence without loss: {error.cause}", "Allow sequences.counts to hold 0") from error
    if not filled.finite:
        raise Broken(
            "is not finite beside a sequence without loss: it divides by its number of tokens",
            "Use tokens.sequences.mean, or clamp counts to 1",
        )
    if not same_evaluation(whole, filled):
        unless_random(subject, case.batch)
    count = len(case.batch) / case.total
    cause = cause_of_ratio(
        whole.token_loss,
        filled.token_loss,
        {"it divides by the number of sequences, empty ones included": np.full(case.batch.tokens, count)},
    )
    require_same(
        whole,
        filled,
        "beside sequences without loss",
        cause or "it takes something over sequences, empty ones included",
        PLAIN_VALUES + BY_NATURE,
    )


@promise(
    "Neighbours in a row do not reach each other: no sequence's loss or gradient depends on another's values",
    cases=cuts,
    exempt=batch_local,
)
def packing(subject: Subject[Any], case: CutBatch) -> None:
    mine = case.batch.places(case.parts[0])
    weights = np.zeros_like(case.batch.weights)
    weights[mine] = case.batch.weights[mine]
    alone = evolve(case.batch, weights=weights)
    others = np.setdiff1d(np.arange(case.batch.tokens), mine)
    changed = alone.with_values(**{name: _shifted(values, others) for name, values in alone.values.items()})
    before, after = decided_evaluation(subject, alone), decided_evaluation(subject, changed)
    if not same(before.token_loss[mine], after.token_loss[mine]):
        unless_random(subject, case.batch)
        place = mine[np.argmax(~np.isclose(before.token_loss[mine], after.token_loss[mine]))]
        raise Broken(
            f"the loss of token {place} changes from {before.token_loss[place]:.6g} to {after.token_loss[place]:.6g} with the values "
            "of other sequences: it takes something over the whole micro-batch, or reaches over the end of a sequence",
            "Take means and differences within a sequence (tokens.sequences)" + BY_NATURE,
        )
    for name, gradient in before.gradients.items():
        if gradient[others].any():
            raise Broken(
                f"the loss of a sequence has a gradient by the {name} of another",
                "Take means and differences within a sequence (tokens.sequences)" + BY_NATURE,
            )


def _shifted(values: rollouts.FloatArray, places: Any) -> rollouts.FloatArray:
    """The values with others at these places; log-probabilities stay below 0."""
    changed = values.copy()
    changed[places] = values[places] * np.float32(0.5) - np.float32(0.125)
    return changed


def _metrics_are_cut(subject: Subject[Any]) -> str | None:
    return None if _metric_names(subject) else "the loss reports no metrics"


def _metric_names(subject: Subject[Any]) -> set[str]:
    try:
        return set(evaluate(subject.label, subject.make(), rollouts.one_token(needs_of(subject))).metrics)
    except EngineError:
        return set()


@promise(
    "Its metrics over micro-batches add up to those of the whole, as their reductions say",
    cases=cuts,
    exempt=any_of(batch_local, _metrics_are_cut),
)
def metrics(subject: Subject[Any], case: CutBatch) -> None:
    whole = decided_evaluation(subject, case.batch).metrics
    parts = combine_metrics([decided_evaluation(subject, case.batch.take(part)).metrics for part in case.parts])
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


CUT_PROMISES: tuple[Promise[Any, Any], ...] = (
    micro_batch_split,
    rank_split,
    sample_order,
    labels,
    padding,
    packing,
    metrics,
)
