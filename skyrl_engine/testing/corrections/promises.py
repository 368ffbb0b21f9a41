"""What must hold of every correction: finite factors without gradient, the same however the batch is cut and whoever is a neighbour."""

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.correction import Correction
from skyrl_engine.errors import EngineError
from skyrl_engine.objective.corrections import correct
from skyrl_engine.objective.tokens import MicroBatchTokens
from skyrl_engine.testing.comparison import cause_of_ratio, factor_between, same
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.process_settings import another_rank, settings_left_alone
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, promise
from skyrl_engine.testing.random_state import global_random_state, restored_random_state, seed_everything
from skyrl_engine.testing.subject import Subject, part_of
from skyrl_engine.testing.tokens import rollouts
from skyrl_engine.testing.tokens.evaluation import SEED, STEP, Numbers, tokens_of, undeclared
from skyrl_engine.testing.tokens.rollouts import CutBatch, FilledBatch, RelabelledBatch, ReorderedBatch, TokenBatch, WornBatch

WITHIN_SEQUENCES = "Take means and products within a sequence (tokens.sequences), and no statistics of the batch"


def _needs(subject: Subject[Any]) -> tuple[str, ...]:
    return tuple(subject.make().needs)


def _ordinary(subject: Subject[Any]) -> st.SearchStrategy[TokenBatch]:
    return rollouts.batches(_needs(subject))


def _anything(subject: Subject[Any]) -> st.SearchStrategy[TokenBatch]:
    ranges: tuple[rollouts.Range, ...] = ("ordinary", "extreme")
    return st.sampled_from(ranges).flatmap(lambda range_: rollouts.batches(_needs(subject), range_=range_))


def _cuts(subject: Subject[Any]) -> st.SearchStrategy[CutBatch]:
    return rollouts.cut_batches(_needs(subject))


def factors_of(label: str, correction: Correction, batch: TokenBatch, dtype: torch.dtype = torch.float64) -> Numbers:
    """float64[n] by the engine's own way, which checks them. Raises EngineError."""
    scores = {"logprobs": torch.from_numpy(batch.values["logprobs"].copy()).to(dtype)}
    scores |= {
        name: torch.from_numpy(batch.values[name].copy()).to(dtype) for name in ("entropy", "values") if name in correction.needs
    }
    tokens = MicroBatchTokens(scores, batch.micro_batch().samples, SEED, STEP)
    factors, _ = correct([part_of(correction, label, "correction")], tokens, first_part=1)
    numbers: Numbers = factors.double().numpy()
    return numbers


def _decided(subject: Subject[Any], batch: TokenBatch, dtype: torch.dtype = torch.float64) -> Numbers:
    try:
        return factors_of(subject.label, subject.make(), batch, dtype)
    except EngineError as error:
        raise Undecidable(error.cause) from error


def _joined(case: CutBatch, parts: list[Numbers]) -> Numbers:
    whole = np.zeros(case.batch.tokens)
    for part, values in zip(case.parts, parts, strict=True):
        whole[case.batch.places(part)] = values
    return whole


def _require_same(one: Numbers, other: Numbers, when: str, cause: str, remedy: str) -> None:
    if same(one, other):
        return
    factor = factor_between(one, other)
    place = int(np.argmax(~np.isclose(one, other)))
    how = (
        f"the factor of token {place} changes from {one[place]:.6g} to {other[place]:.6g}"
        if factor is None
        else f"changes x{factor:.2f}"
    )
    raise Broken(f"{how} {when}: {cause}", remedy, factor=factor)


@promise("It answers every batch, of which it reads only what it declares in needs", cases=_anything)
def needs(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        factors_of(subject.label, subject.make(), batch, torch.float32)
    except EngineError as error:
        if undeclared(error):
            raise Broken(f"reads what it does not declare: {error.__cause__}", "Add the name to its needs") from error
        if "returned" in error.cause:
            raise Undecidable(error.cause) from error
        raise Broken(error.cause, error.remedy) from error


@promise("It returns one finite factor of 0 or more per token, also for ratios of e^30", cases=_anything)
def finite_factors(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        factors_of(subject.label, subject.make(), batch, torch.float32)
    except EngineError as error:
        if "returned" not in error.cause:
            raise Undecidable(error.cause) from error
        raise Broken(error.cause, f"{error.remedy}; clamp what goes into exp()") from error


@promise("Its factors carry no gradient", cases=_ordinary)
def detached(subject: Subject[Any], batch: TokenBatch) -> None:
    correction = subject.make()
    try:
        made = correction(tokens_of(subject.label, correction.needs, batch))
    except Exception as error:
        raise Undecidable(f"it fails: {error}") from error
    if isinstance(made, torch.Tensor) and made.requires_grad:
        raise Broken("its factors require a gradient although nothing it was given does", "Return made.detach()")


@promise("A batch cut into micro-batches has the factors of the whole", cases=_cuts)
def micro_batch_split(subject: Subject[Any], case: CutBatch) -> None:
    whole = _decided(subject, case.batch)
    parts = _joined(case, [_decided(subject, case.batch.take(part)) for part in case.parts])
    own_tokens = np.zeros(case.batch.tokens)
    for part in case.parts:
        own_tokens[case.batch.places(part)] = len(case.batch.places(part))
    cause = cause_of_ratio(whole, parts, {"it divides by the number of tokens in its micro-batch": case.batch.tokens / own_tokens})
    count = {2: "two", 3: "three"}[len(case.parts)]
    _require_same(
        whole, parts, f"under {count} micro-batches", cause or "it depends on which samples share its micro-batch", WITHIN_SEQUENCES
    )


@promise(
    "It remembers nothing between micro-batches: the ranks that compute them have corrections of their own",
    cases=lambda subject: rollouts.worn_batches(_needs(subject)),
)
def rank_split(subject: Subject[Any], worn: WornBatch) -> None:
    case = worn.cut
    correction = subject.make()
    try:
        for call in range(worn.calls):
            factors_of(subject.label, correction, case.batch.take(case.parts[call % len(case.parts)]))
        together = _joined(case, [factors_of(subject.label, correction, case.batch.take(part)) for part in case.parts])
    except EngineError as error:
        raise Undecidable(error.cause) from error
    apart = _joined(case, [_decided(subject, case.batch.take(part)) for part in case.parts])
    when = f"where {len(case.parts)} ranks compute what one rank did"
    _require_same(together, apart, when, "it keeps something from one call to the next", "Make it a function of its tokens")


@promise("The order of the samples changes nothing", cases=lambda subject: rollouts.reordered_batches(_needs(subject)))
def sample_order(subject: Subject[Any], case: ReorderedBatch) -> None:
    whole = _decided(subject, case.batch)
    moved = _joined(CutBatch(case.batch, (case.order,)), [_decided(subject, case.batch.take(case.order))])
    _require_same(whole, moved, "in another order of samples", "it depends on the place of a token among the n", WITHIN_SEQUENCES)


@promise(
    "What groups and units are called changes nothing",
    cases=lambda subject: rollouts.relabelled_batches(_needs(subject)),
)
def labels(subject: Subject[Any], case: RelabelledBatch) -> None:
    plain = _decided(subject, case.batch)
    remedy = "Number labels with torch.unique(..., return_inverse=True), and take no id for a place"
    try:
        renamed = factors_of(subject.label, subject.make(), case.relabelled)
    except EngineError as error:
        raise Broken(f"fails where labels are other numbers: {error.cause}", remedy) from error
    _require_same(plain, renamed, "with other labels", "it takes an id for a number", remedy)


@promise(
    "Sequences of which nothing is left, and micro-batches without a token, change nothing",
    cases=lambda subject: rollouts.filled_batches(_needs(subject)),
)
def padding(subject: Subject[Any], case: FilledBatch) -> None:
    whole = _decided(subject, case.batch)
    try:
        filled = factors_of(subject.label, subject.make(), case.filled)
    except EngineError as error:
        raise Broken(f"fails beside a sequence without tokens: {error.cause}", "Allow sequences.counts to hold 0") from error
    _require_same(
        whole, filled, "beside sequences without tokens", "it takes something over sequences, empty ones included", WITHIN_SEQUENCES
    )


@promise("Where no token is left it returns no factor", cases=lambda subject: rollouts.masked_batches(_needs(subject)))
def all_masked(subject: Subject[Any], batch: TokenBatch) -> None:
    try:
        factors_of(subject.label, subject.make(), batch)
    except EngineError as error:
        _decided(subject, rollouts.one_token(_needs(subject)))  # what fails with a token as well is another promise's
        raise Broken(f"fails without a token: {error.cause}", "Let it return an empty tensor for n = 0") from error


@promise("Neighbours in a row do not reach each other: no sequence's factors depend on another's values", cases=_cuts)
def packing(subject: Subject[Any], case: CutBatch) -> None:
    mine = case.batch.places(case.parts[0])
    others = np.setdiff1d(np.arange(case.batch.tokens), mine)
    values = {}
    for name, column in case.batch.values.items():
        values[name] = column.copy()
        values[name][others] = column[others] * np.float32(0.5) - np.float32(0.125)
    before, after = _decided(subject, case.batch)[mine], _decided(subject, case.batch.with_values(**values))[mine]
    _require_same(
        before, after, "with the values of other sequences", "it takes something over the whole micro-batch", WITHIN_SEQUENCES
    )


@promise("float32 is within 1e-4 of float64", cases=_ordinary)
def precision(subject: Subject[Any], batch: TokenBatch) -> None:
    exact, single = _decided(subject, batch), _decided(subject, batch, torch.float32)
    if not same(exact, single, relative=1e-4, absolute=1e-4):
        worst = int(np.argmax(np.abs(exact - single)))
        raise Broken(
            f"loses precision: token {worst} has the factor {single[worst]:.6g} in float32 and {exact[worst]:.6g} in float64",
            "Cast nothing to half precision, and subtract logarithms before exp()",
        )


@promise("It leaves the global random state alone, and does not depend on it", cases=_ordinary)
def global_random_numbers(subject: Subject[Any], batch: TokenBatch) -> None:
    with restored_random_state():
        made = []
        for seed in (1, 2, 1):
            seed_everything(seed)
            before = global_random_state()
            made.append(_decided(subject, batch))
            if global_random_state() != before:
                raise Broken("draws from the global random state, which differs from rank to rank", "Draw from tokens.generator")
    if same(made[0], made[2]) and not same(made[0], made[1]):
        raise Broken("depends on the global random state", "Draw from tokens.generator")


@promise("Replicas of one micro-batch get the same factors", cases=_ordinary)
def replicas(subject: Subject[Any], batch: TokenBatch) -> None:
    with restored_random_state():
        seed_everything(7)
        one = _decided(subject, batch)
        seed_everything(7)
        with another_rank():
            other = _decided(subject, batch)
    _require_same(
        one,
        other,
        "between two replicas",
        "it draws from a source of its own, counts its calls, or asks which rank it is on",
        "Make it a function of its tokens; draw from tokens.generator, which replicas share",
    )


@promise("It leaves torch's settings as they are", cases=_ordinary, effort=0.1)
def process_settings(subject: Subject[Any], batch: TokenBatch) -> None:
    with settings_left_alone(), suppress(Undecidable):
        _decided(subject, batch)


@promise("It does not change what it is given", cases=_ordinary)
def inputs_unchanged(subject: Subject[Any], batch: TokenBatch) -> None:
    correction = subject.make()
    tokens = tokens_of(subject.label, correction.needs, batch)
    copies = {name: tensor.clone() for name, tensor in tokens.needs.items()}
    versions = {name: tensor._version for name, tensor in tokens.needs.items()}  # noqa: SLF001 - counts writes, which the same values hide
    try:
        correction(tokens)
    except Exception as error:
        raise Undecidable(f"it fails: {error}") from error
    for name, before in copies.items():
        if tokens.needs[name]._version != versions[name] or not torch.equal(before, tokens.needs[name]):  # noqa: SLF001 - as above
            raise Broken(f"changes {name} in place, which corrections after it read too", "Work on a copy: x * y, not x.mul_(y)")


CORRECTION_PROMISES: tuple[Promise[Any, Any], ...] = (
    process_settings,  # first: once set they are set
    replicas,  # soon: what wears off after some calls is seen while it lasts
    needs,
    finite_factors,
    detached,
    micro_batch_split,
    rank_split,
    sample_order,
    labels,
    padding,
    all_masked,
    packing,
    precision,
    global_random_numbers,
    inputs_unchanged,
    *PLUGIN_PROMISES,
)
