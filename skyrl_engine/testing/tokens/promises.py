"""Promises that losses and corrections share: no cut, order, name or neighbour changes a token's number, and nothing else is touched.

Numbers are compared as the engine uses them, in float64: per token, their total, and its gradient by every score of the model.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from types import FunctionType
from typing import Any

import numpy as np
import torch
from attrs import evolve

from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.errors import EngineError, ResultError
from skyrl_engine.testing.another_rank import another_rank
from skyrl_engine.testing.collectives import CollectiveCalled, no_collectives
from skyrl_engine.testing.comparison import ABSOLUTE, cause_of_ratio, is_constant_within, is_same
from skyrl_engine.testing.other_device import OtherDevice, WrongDevice
from skyrl_engine.testing.process_promises import SETTINGS_SENTENCE
from skyrl_engine.testing.process_settings import require_settings_left_alone
from skyrl_engine.testing.promise import Broken, Undecidable
from skyrl_engine.testing.random_state import global_random_state, restore_random_state, seed_everything
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import explicit, rollouts
from skyrl_engine.testing.tokens.evaluation import (
    Evaluation,
    Listening,
    is_same_evaluation,
    is_undeclared_need,
    join_evaluations,
    require_same_evaluation,
)
from skyrl_engine.testing.tokens.kind import (
    TokenKind,
    draw_anything,
    draw_cuts,
    draw_ordinary,
    list_anything,
    list_cuts,
    needs_of,
    shared_promise,
)
from skyrl_engine.testing.tokens.token_batches import CutBatch, FilledBatch, RelabelledBatch, ReorderedBatch, TokenBatch, WornBatch

WITHIN_SEQUENCES = "Take means and differences within a sequence (tokens.sequences)"


@shared_promise(SETTINGS_SENTENCE, cases=draw_ordinary, effort=0.1)
def process_settings(kind: TokenKind, subject: Subject[Any], batch: TokenBatch) -> None:
    def call() -> None:
        with suppress(Undecidable):
            kind.evaluate_or_undecidable(subject, batch)

    require_settings_left_alone(call)


@shared_promise("Replicas of one micro-batch get the same numbers, random ones included", cases=draw_ordinary)
def replicas(kind: TokenKind, subject: Subject[Any], batch: TokenBatch) -> None:
    before = _options(subject)
    with restore_random_state():
        seed_everything(7)
        one = kind.evaluate_or_undecidable(subject, batch)
        if _options(subject) != before:
            raise Broken(
                "changes its options, which every later call and every checkpoint reads", "Compute from options, and set none"
            )
        seed_everything(7)
        with another_rank():
            other = kind.evaluate_or_undecidable(subject, batch)
    require_same_evaluation(
        one,
        other,
        "between two replicas",
        "it draws from a source of its own, counts its calls or remembers earlier ones, asks which rank it is on, or takes hash() of a text",
        "Make it a function of its tokens; draw from tokens.generator, which replicas share",
        relative=0,
        absolute=0,
    )


def _options(subject: Subject[Any]) -> object:
    """Return a copy of the options that products share; None where there are none."""
    options = subject.plugin.options if subject.plugin is not None else getattr(subject.make(), "config", None)
    return deepcopy(options)


@shared_promise(
    "It answers every batch, of which it reads only what it declares in needs", cases=draw_anything, first=list_anything
)
def needs(kind: TokenKind, subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        kind.evaluate_subject(subject, batch, dtype=torch.float32)
    except EngineError as error:
        if is_undeclared_need(error):
            raise Broken(f"reads what it does not declare: {error.__cause__}", "Add the name to its needs") from error
        if isinstance(error, ResultError):
            raise Undecidable(error.cause) from error
        raise Broken(error.cause, error.remedy) from error


@shared_promise(
    "A micro-batch without any loss-carrying token adds nothing and breaks nothing",
    cases=lambda subject: rollouts.draw_masked_batches(needs_of(subject)),
)
def all_masked(kind: TokenKind, subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        evaluation = kind.evaluate_subject(subject, batch, dtype=torch.float32)
    except EngineError as error:
        kind.evaluate_or_undecidable(
            subject, explicit.one_token(needs_of(subject))
        )  # what fails with a token as well is another promise's
        raise Broken(f"fails without a token: {error.cause}", "Let it return an empty tensor for n = 0") from error
    if evaluation.total != 0:
        raise Broken(f"the {kind.noun} of no token is {evaluation.total}", "Return an empty tensor for n = 0")
    for name, metric in evaluation.metrics.items():
        if math.isnan(metric.value) or math.isnan(metric.count):
            raise Broken(
                f"the metric {name!r} is NaN without a token, and stays so in the sum over all micro-batches",
                "Report a mean as its sum and its count (Metric.mean(values.sum(), len(values)))",
            )


@shared_promise("A batch cut into micro-batches has the {results} of the whole", cases=draw_cuts, about_cuts=True, first=list_cuts)
def micro_batch_split(kind: TokenKind, subject: Subject[Any], case: CutBatch) -> None:
    whole = kind.evaluate_or_undecidable(subject, case.batch)
    parts = join_evaluations(case, [kind.evaluate_or_undecidable(subject, case.batch.take(part)) for part in case.parts])
    if is_same_evaluation(whole, parts):
        return
    kind.require_repeatable(subject, case.batch)
    count = {2: "two", 3: "three"}[len(case.parts)]
    require_same_evaluation(
        whole, parts, f"under {count} micro-batches", _cause_of_cut(kind, subject, case, whole, parts), kind.remedy + kind.unless
    )


def _cause_of_cut(kind: TokenKind, subject: Subject[Any], case: CutBatch, whole: Evaluation, parts: Evaluation) -> str:
    if whole.drew:
        return "it draws random numbers, and which of them a token gets depends on the cut"
    batch = case.batch
    own_tokens, own_sequences, part_of = (np.zeros(batch.tokens) for _ in range(3))
    for number, part in enumerate(case.parts):
        places = batch.places(part)
        own_tokens[places], own_sequences[places], part_of[places] = len(places), len(part), number
    candidates = {
        "it divides by its own mask, the number of tokens in its micro-batch": batch.tokens / own_tokens,
        "it divides by the number of sequences in its micro-batch": len(batch) / own_sequences,
        "it multiplies by the number of tokens in its micro-batch": own_tokens / batch.tokens,
        "it multiplies by the number of sequences in its micro-batch": own_sequences / len(batch),
    }
    cause = cause_of_ratio(whole.per_token, parts.per_token, candidates)
    difference = parts.per_token - whole.per_token
    # tokens of one value differ by one number whatever is done to them
    is_varied = all(
        np.ptp(whole.per_token[part_of == part]) > ABSOLUTE for part in np.unique(part_of[np.abs(difference) > ABSOLUTE])
    )
    if cause is None and is_varied and is_constant_within(difference, part_of.astype(np.int64)):
        cause = "it subtracts or adds something that it takes over its micro-batch"
    return cause or _cause_at_borders(kind, subject) or "it depends on which samples share its micro-batch"


def _cause_at_borders(kind: TokenKind, subject: Subject[Any]) -> str | None:
    """Return the cause where, of many sequences cut in two, no other tokens change than those that begin a sequence, or that end one."""
    case = explicit.cut_many(needs_of(subject))
    try:
        whole = kind.evaluate_or_undecidable(subject, case.batch)
        parts = join_evaluations(case, [kind.evaluate_or_undecidable(subject, case.batch.take(part)) for part in case.parts])
    except Undecidable:
        return None
    changed = np.flatnonzero(np.abs(parts.per_token - whole.per_token) > ABSOLUTE)
    ends = np.cumsum(case.batch.lengths)
    for places, word, other in ((ends - case.batch.lengths, "first", "before"), (ends - 1, "last", "behind")):
        if changed.size and np.isin(changed, places).all():
            return f"only the {word} token of a sequence changes: it reads the token {other} it, which is of another sequence"
    return None


@shared_promise(
    "It remembers nothing between micro-batches: the ranks that compute them have {products} of their own",
    cases=lambda subject: rollouts.draw_worn_batches(needs_of(subject)),
    first=lambda subject: explicit.list_worn(needs_of(subject)),
)
def rank_split(kind: TokenKind, subject: Subject[Any], worn: WornBatch) -> None:
    case = worn.cut
    one_rank = subject.make()
    for call in range(worn.calls):
        kind.evaluate_or_undecidable(subject, case.batch.take(case.parts[call % len(case.parts)]), one_rank)
    together = join_evaluations(
        case, [kind.evaluate_or_undecidable(subject, case.batch.take(part), one_rank) for part in case.parts]
    )
    apart = join_evaluations(case, [kind.evaluate_or_undecidable(subject, case.batch.take(part)) for part in case.parts])
    if not is_same_evaluation(together, apart):
        kind.require_repeatable(subject, case.batch)
    require_same_evaluation(
        together,
        apart,
        f"where {len(case.parts)} ranks compute what one rank did",
        "it keeps something from one call to the next",
        "Make it a function of its tokens; what lasts longer belongs into a column of the data",
    )


@shared_promise(
    "The order of the samples changes nothing",
    cases=lambda subject: rollouts.draw_reordered_batches(needs_of(subject)),
    about_cuts=True,
    first=lambda subject: explicit.list_reordered_threes(needs_of(subject)),
)
def sample_order(kind: TokenKind, subject: Subject[Any], case: ReorderedBatch) -> None:
    whole = kind.evaluate_or_undecidable(subject, case.batch)
    moved = join_evaluations(
        CutBatch(case.batch, (case.order,)), [kind.evaluate_or_undecidable(subject, case.batch.take(case.order))]
    )
    if not is_same_evaluation(whole, moved):
        kind.require_repeatable(subject, case.batch)
    require_same_evaluation(
        whole,
        moved,
        "in another order of samples",
        "it depends on the place of a token among the n",
        kind.remedy + kind.unless,
    )


@shared_promise(
    "What groups and units are called changes nothing",
    cases=lambda subject: rollouts.draw_relabelled_batches(needs_of(subject)),
    first=lambda subject: explicit.list_closely_relabelled(needs_of(subject)),
)
def labels(kind: TokenKind, subject: Subject[Any], case: RelabelledBatch) -> None:
    plain = kind.evaluate_or_undecidable(subject, case.batch)
    remedy = "Number labels with torch.unique(..., return_inverse=True), and take no id for a place"
    try:
        renamed = kind.evaluate_subject(subject, case.relabelled)
    except EngineError as error:
        raise Broken(f"fails where labels are other numbers: {error.cause}", remedy) from error
    if not is_same_evaluation(plain, renamed):
        kind.require_repeatable(subject, case.batch)
    require_same_evaluation(plain, renamed, "with other labels", "it takes an id for a number", remedy)


@shared_promise(
    "Sequences without loss-carrying tokens, and the empty micro-batches that fill up ranks, change nothing",
    cases=lambda subject: rollouts.draw_filled_batches(needs_of(subject)),
    about_cuts=True,
    first=lambda subject: explicit.list_filled_threes(needs_of(subject)),
)
def padding(kind: TokenKind, subject: Subject[Any], case: FilledBatch) -> None:
    whole = kind.evaluate_or_undecidable(subject, case.batch)
    try:
        filled = kind.evaluate_subject(subject, case.filled)
    except EngineError as error:
        raise Broken(f"fails beside a sequence without tokens: {error.cause}", "Allow sequences.counts to hold 0") from error
    if not filled.finite:
        raise Broken(
            "is not finite beside a sequence without tokens: it divides by their number",
            "Use tokens.sequences.mean, or clamp counts to 1",
        )
    if not is_same_evaluation(whole, filled):
        kind.require_repeatable(subject, case.batch)
    count = np.full(case.batch.tokens, len(case.batch) / case.total)
    cause = cause_of_ratio(whole.per_token, filled.per_token, {"it divides by the number of sequences, empty ones included": count})
    require_same_evaluation(
        whole,
        filled,
        "beside sequences without tokens",
        cause or "it takes something over sequences, empty ones included",
        kind.remedy + kind.unless,
    )


@shared_promise(
    "Neighbours in a row do not reach each other: no sequence's {results} depend on another's values",
    cases=draw_cuts,
    about_cuts=True,
    first=list_cuts,
)
def packing(kind: TokenKind, subject: Subject[Any], case: CutBatch) -> None:
    own_places = case.batch.places(case.parts[0])
    weights = np.zeros_like(case.batch.weights)
    weights[own_places] = case.batch.weights[own_places]
    alone = evolve(case.batch, weights=weights)
    others = np.setdiff1d(np.arange(case.batch.tokens), own_places)
    changed = alone.with_values(**{name: _shift(values, others) for name, values in alone.values.items()})
    before, after = kind.evaluate_or_undecidable(subject, alone), kind.evaluate_or_undecidable(subject, changed)
    if not is_same(before.per_token[own_places], after.per_token[own_places]):
        kind.require_repeatable(subject, case.batch)
        place = own_places[np.argmax(~np.isclose(before.per_token[own_places], after.per_token[own_places]))]
        raise Broken(
            f"the {kind.noun} of token {place} changes from {before.per_token[place]:.6g} to {after.per_token[place]:.6g} with the values "
            "of other sequences: it takes something over the whole micro-batch, or reaches over the end of a sequence",
            WITHIN_SEQUENCES + kind.unless,
        )
    for name, gradient in before.gradients.items():
        if gradient[others].any():
            raise Broken(f"the {kind.noun} of a sequence has a gradient by the {name} of another", WITHIN_SEQUENCES + kind.unless)


def _shift(values: AnyArray, places: Any) -> AnyArray:
    """Return the values with others at these places; log-probabilities stay below 0, and ids of tokens are such."""
    changed = values.copy()
    if values.dtype.kind == "i":
        changed[places] = values[places] + 1
        return changed
    changed[places] = values[places] * np.float32(0.5) - np.float32(0.125)
    return changed


@shared_promise("It leaves the global random state alone, and does not depend on it", cases=draw_ordinary)
def global_random_numbers(kind: TokenKind, subject: Subject[Any], batch: TokenBatch) -> None:
    with restore_random_state():
        evaluations = []
        for seed in (1, 2, 1):
            seed_everything(seed)
            before = global_random_state()
            evaluations.append(kind.evaluate_or_undecidable(subject, batch))
            if global_random_state() != before:
                raise Broken("draws from the global random state, which differs from rank to rank", "Draw from tokens.generator")
    one, other, again = evaluations
    if is_same_evaluation(one, again) and not is_same_evaluation(one, other):
        raise Broken("depends on the global random state", "Draw from tokens.generator")


@shared_promise(
    "It works on other devices than the CPU: its tensors are made where its tokens are, and it calls no collective",
    cases=draw_ordinary,
    effort=0.05,
    first=lambda subject: [
        explicit.make_threes(needs_of(subject)),
        *explicit.fillers(explicit.make_threes(needs_of(subject))),
        explicit.make_many(needs_of(subject)),
    ],
)
def devices(kind: TokenKind, subject: Subject[Any], batch: TokenBatch) -> None:
    device = OtherDevice()
    with device:
        product = subject.make()
    device.put_on_host(*constants_of(product))
    listening = Listening(product, device)
    where = (
        "Make tensors with device=tokens.logprobs.device, or by x.new_zeros() and torch.ones_like(x); compute with torch, not NumPy"
    )
    try:
        with no_collectives():
            kind.evaluate(subject.label, listening, batch, backward_mode=device)
    except EngineError as error:
        if isinstance(error.__cause__, WrongDevice):
            raise Broken(f"works on the CPU alone: {error.__cause__}", where) from error
        if isinstance(error.__cause__, CollectiveCalled):
            raise Broken(
                f"{error.__cause__}, at which ranks with other numbers of micro-batches wait for ever",
                "Make it a function of its tokens; the engine sums over ranks",
            ) from error
        raise Undecidable(error.cause) from error
    output = listening.heard["output"]
    result = getattr(output, "token_loss", output)
    if device.place(result) == "host":
        raise Broken("returns a tensor of the CPU, wherever its tokens are", where)


def constants_of(product: Any) -> list[object]:
    """Return what the product and its function hold: attributes, globals that it names, defaults and closures, and those of functions among
    them.

    Tensors among them were made on the CPU. Caches of functions (`functools.cache`) are emptied: what they held is made again.
    """
    constants: list[object] = [getattr(product, "__dict__", {})]
    waiting: list[object] = [getattr(product, "function", None), vars(type(product)).get("__call__")]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if callable(clear := getattr(function, "cache_clear", None)):
            clear()
            function = getattr(function, "__wrapped__", None)
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        values = [function.__globals__.get(name) for name in function.__code__.co_names]
        values += [cell.cell_contents for cell in function.__closure__ or ()]
        constants += [values, list(function.__defaults__ or ())]
        own_module = function.__module__
        waiting += [value for value in values if getattr(value, "__module__", None) == own_module]
    return constants


@shared_promise("It does not change what it is given", cases=draw_ordinary)
def inputs_unchanged(kind: TokenKind, subject: Subject[Any], batch: TokenBatch) -> None:
    copying = _Copying(subject.make())
    kind.evaluate_or_undecidable(subject, batch, copying, dtype=torch.float32)
    for name, (before, after, written) in copying.inputs.items():
        if written or not torch.equal(before, after):
            raise Broken(
                f"changes {name} in place, which other parts of the objective read too", "Work on a copy: x * y, not x.mul_(y)"
            )


class _Copying:
    """A wrapper of the product that copies its arguments before the call, to compare them afterwards."""

    def __init__(self, product: Any) -> None:
        self.product = product
        self.inputs: Mapping[str, tuple[torch.Tensor, torch.Tensor, bool]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.product, name)

    def __call__(self, tokens: Any) -> Any:
        sequences = {f"sequences.{name}": getattr(tokens.sequences, name) for name in ("index", "counts", "unit_ids", "group_ids")}
        tensors = {**tokens.needs, **sequences}
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        versions = {name: tensor._version for name, tensor in tensors.items()}  # noqa: SLF001 - counts writes, which the same values hide
        result = self.product(tokens)
        self.inputs = {
            name: (copies[name], tensor.detach(), tensor._version != versions[name])  # noqa: SLF001 - as above
            for name, tensor in tensors.items()
        }
        return result
