"""Promises of every reducer, as far as its declarations go: `batch_local`, `empty_sequence` and `negative_weights`."""

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import evolve

from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.errors import ConfigError, DataError, EngineError, UnsupportedError
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.testing.comparison import factor_between, format_factor, is_same, require_same
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.process_promises import process_promises
from skyrl_engine.testing.promise import Broken, Inapplicable, Promise, Undecidable, promise
from skyrl_engine.testing.random_state import global_random_state, restore_random_state, seed_everything
from skyrl_engine.testing.reducers import structures
from skyrl_engine.testing.reducers.reading import Reading, reading_of
from skyrl_engine.testing.reducers.structures import (
    DrawnStructure,
    ExtendedStructure,
    RecutStructure,
    RelabelledStructure,
    ReorderedStructure,
)
from skyrl_engine.testing.subject import Subject, part_of
from skyrl_engine.workers.dispatch import token_weights

Weights = npt.NDArray[np.float64]
AnyDrawn = TypeVar("AnyDrawn", bound=DrawnStructure)

_PROBE = structures.structure_of([np.ones(length, np.float32) for length in (4, 2, 1)], group_ids=np.zeros(3, np.int64))
"""Three unequal lengths in a group: with two, a median is a mean."""


def _reading(subject: Subject[Any]) -> Reading:
    return reading_of(subject, _PROBE)


def _draw(subject: Subject[Any], **options: Any) -> Any:
    return structures.structures(reading=_reading(subject), **options).map(DrawnStructure)


def _list_explicit(subject: Subject[Any]) -> list[DrawnStructure]:
    return _fill(subject, structures.list_explicit())


def _fill(subject: Subject[Any], cases: Iterable[AnyDrawn]) -> list[AnyDrawn]:
    """Give explicit structures the columns and values of samples that the reducer needs, in each way that it answers."""
    reading = _reading(subject)
    return [evolve(case, structure=reading.fill(case.structure, way)) for case in cases for way in range(len(reading.ways))]


def _weights_or_undecidable(subject: Subject[Any], structure: BatchStructure) -> Weights:
    """Return the weights as the engine takes them. Raises Undecidable for a reducer that fails or returns something else."""
    try:
        return token_weights(part_of(subject.make(), subject.label, "reducer"), structure)
    except EngineError as error:
        raise Undecidable(error.cause) from error


def _require_same(one: Weights, other: Weights, when: str, cause: str, remedy: str) -> None:
    if is_same(one, other, relative=1e-6, absolute=1e-9):
        cause, remedy = "it computes in float32, whose rounding depends on the order", "Compute weights in float64"
    require_same("weight", one, other, when, cause, remedy, relative=1e-12, absolute=1e-15)


# --- what it returns ---------------------------------------------------------------------------------------------------------------


@promise(
    "It returns float64[A], contiguous and finite, also where no token carries loss",
    cases=_draw,
    first=lambda subject: _fill(
        subject,
        [
            *structures.list_explicit(),
            DrawnStructure(structures.make_without_groups()),
            DrawnStructure(structures.make_without_length()),
        ],
    ),
)
def finite_weights(subject: Subject[Any], case: DrawnStructure) -> None:
    try:
        weights = token_weights(part_of(subject.make(), subject.label, "reducer"), case.structure)
    except EngineError as error:
        if isinstance(error, DataError) and not case.structure.grouped:
            raise Inapplicable(error.cause) from error  # a reducer of groups refuses data that has none
        if isinstance(error, DataError | ConfigError | UnsupportedError) and case.structure.max_sequence_length is None:
            raise Inapplicable(error.cause) from error  # one that divides by it asks for it
        raise Broken(error.cause, error.remedy) from error
    if not weights.flags.c_contiguous:
        raise Broken("its weights are not contiguous", "Return np.ascontiguousarray(weights)")
    if np.shares_memory(weights, case.structure.loss_weight):
        raise Broken("its weights share memory with the batch's loss weights", "Return an array of its own")


@promise(
    "A token without loss has the weight 0, and one with loss another, unless it declares to be selective",
    cases=_draw,
    first=_list_explicit,
)
def loss_weights_decide(subject: Subject[Any], case: DrawnStructure) -> None:
    weights = _weights_or_undecidable(subject, case.structure)
    carrying = case.structure.loss_weight != 0
    wrong = (weights != 0) & ~carrying if subject.declares("selective") else (weights != 0) != carrying
    for place in np.flatnonzero(wrong).tolist()[:1]:
        sequence = int(case.structure.sequence_index[place])
        cause = "it is lost" if carrying[place] else "it counts although it carries no loss"
        raise Broken(
            f"the weight of token {place} (sequence {sequence}), whose loss weight is {case.structure.loss_weight[place]:g}, is "
            f"{weights[place]:g}: {cause}",
            "Multiply by structure.loss_weight as it is: no rounding, no sequence left out",
        )


def _has_no_oracle(subject: Subject[Any]) -> str | None:
    return None if "oracle" in subject.hooks else "there is no oracle to compare with"


@promise("Its weights are those of the oracle", cases=_draw, exempt=_has_no_oracle, first=_list_explicit)
def oracle(subject: Subject[Any], case: DrawnStructure) -> None:
    weights, expected = (
        _weights_or_undecidable(subject, case.structure),
        np.asarray(subject.hooks["oracle"](case.structure), dtype=np.float64),
    )
    _require_same(expected, weights, "from what the oracle gives", "formula and code differ", "Compare the two")


# --- what it may depend on ---------------------------------------------------------------------------------------------------------


def _batch_local(subject: Subject[Any]) -> str | None:
    return "the reducer declares batch_local: it depends on the cut by nature" if subject.declares("batch_local") else None


@promise(
    "How the mini-batch is cut into micro-batches changes nothing",
    cases=lambda subject: structures.draw_recut(_reading(subject)),
    exempt=_batch_local,
    first=lambda subject: _fill(subject, structures.list_recut()),
)
def micro_batch_split(subject: Subject[Any], case: RecutStructure) -> None:
    _require_same(
        _weights_or_undecidable(subject, case.structure),
        _weights_or_undecidable(subject, case.recut),
        "in other micro-batches",
        "it divides by counts of a micro-batch",
        "Count over the whole mini-batch, or declare batch_local = True",
    )


@promise(
    "The order of the sequences changes nothing",
    cases=lambda subject: structures.draw_reordered(_reading(subject)),
    first=lambda subject: _fill(subject, structures.list_reordered()),
)
def sample_order(subject: Subject[Any], case: ReorderedStructure) -> None:
    _require_same(
        _weights_or_undecidable(subject, case.structure)[case.tokens],
        _weights_or_undecidable(subject, case.moved),
        "in another order of sequences",
        "it takes neighbours for members of one group, or an id for a place",
        "Number labels with np.unique(..., return_inverse=True)",
    )


@promise(
    "What groups, units and samples are called changes nothing",
    cases=lambda subject: structures.draw_relabelled(_reading(subject)),
    first=lambda subject: _fill(subject, structures.list_closely_relabelled()),
)
def labels(subject: Subject[Any], case: RelabelledStructure) -> None:
    original = evolve(
        case.structure,
        group_ids=np.unique(case.structure.group_ids, return_inverse=True)[1],
    )
    weights, relabelled = _weights_or_undecidable(subject, original), case.relabelled
    if subject.declares("batch_local"):  # the same micro-batches, of whose numbers some do not occur
        relabelled = evolve(relabelled, micro_batch=3 * relabelled.micro_batch + 2)
    try:
        renamed = token_weights(part_of(subject.make(), subject.label, "reducer"), relabelled)
    except EngineError as error:
        raise Broken(f"fails where labels are other numbers: {error.cause}", "Take no id for a place; see np.unique") from error
    remedy = "Number labels with np.unique(..., return_inverse=True)"
    _require_same(weights, renamed, "with other labels", "it takes an id for a number", remedy)


def _not_additive(subject: Subject[Any]) -> str | None:
    return None if subject.declares("additive") else "the reducer does not declare additive"


@promise(
    "In a part of the mini-batch its weights are those in the whole, as it declares additive",
    cases=_draw,
    exempt=_not_additive,
    first=_list_explicit,
    effort=0.5,
)
def additive(subject: Subject[Any], case: DrawnStructure) -> None:
    part = ReorderedStructure(case.structure, np.arange(0, len(case.structure), 2, dtype=np.int64))
    _require_same(
        _weights_or_undecidable(subject, case.structure)[part.tokens],
        _weights_or_undecidable(subject, part.moved),
        "without every second sequence",
        "it counts over the mini-batch, and gradients of several are added up",
        "Let a token's weight depend on that token alone, or do not declare additive",
    )


# --- what it measures --------------------------------------------------------------------------------------------------------------


def _probe(subject: Subject[Any]) -> BatchStructure:
    return _reading(subject).fill(_PROBE)


def _is_mean(subject: Subject[Any]) -> bool:
    """Return True where halving all loss weights changes nothing in a plain batch, as in a mean; a sum is halved."""
    probe = _probe(subject)
    return is_same(
        _weights_or_undecidable(subject, probe),
        _weights_or_undecidable(subject, evolve(probe, loss_weight=probe.loss_weight * np.float32(0.5))),
    )


@promise(
    "Halving all loss weights changes nothing (a mean) or halves everything (a sum), the same way in every batch",
    cases=_draw,
    first=_list_explicit,
)
def scale(subject: Subject[Any], case: DrawnStructure) -> None:
    whole = case.structure.loss_weight.astype(np.float32)
    weights = _weights_or_undecidable(subject, evolve(case.structure, loss_weight=whole))
    halved = _weights_or_undecidable(subject, evolve(case.structure, loss_weight=whole * np.float32(0.5)))
    mean = _is_mean(subject)
    expected = weights if mean else weights / 2
    if not is_same(halved, expected, relative=1e-6):
        factor = factor_between(expected, halved)
        raise Broken(
            f"changes{format_factor(factor)} under uniform weights of .5, where a {'mean' if mean else 'sum'} "
            f"{'does not' if mean else 'is halved'}: a sum of weights is rounded, or kept from falling below 1",
            "Divide by structure.mass in float64, guarded by np.where(mass == 0, 1, mass)",
            factor=factor,
        )


def _no_mean_of_a_constant(subject: Subject[Any]) -> str | None:
    try:
        mean = _is_mean(subject) and bool(np.isclose(_weights_or_undecidable(subject, _probe(subject)).sum(), 1))
    except Undecidable:
        return None
    return None if mean else "the reducer is no mean: its weights of a plain batch do not sum to 1"


@promise(
    "The weights of a mean sum to 1 where every sequence carries loss",
    cases=lambda subject: _draw(subject, empty=False),
    exempt=_no_mean_of_a_constant,
    first=lambda subject: _fill(subject, structures.list_explicit(empty=False)),
)
def weights_sum(subject: Subject[Any], case: DrawnStructure) -> None:
    total = float(_weights_or_undecidable(subject, case.structure).sum())
    if not np.isclose(total, 1, rtol=1e-6):
        raise Broken(
            f"the weights sum to {total:.6g}, so the mean of a constant is x{total:.2f}",
            "Divide by the sum that is taken",
            factor=total,
        )


@promise(
    "Sequences without loss count as `empty_sequence` declares",
    cases=lambda subject: structures.draw_with_empty(_reading(subject)),
    first=lambda subject: _fill(subject, structures.list_with_empty()),
)
def empty_sequences(subject: Subject[Any], case: ExtendedStructure) -> None:
    before = _weights_or_undecidable(subject, case.structure)
    after = _weights_or_undecidable(subject, case.extended)[: len(before)]
    factor = factor_between(before, after)
    if is_same(before, after):
        return
    declared = subject.make().empty_sequence
    company = f"beside {len(case.actions)} sequence{'s' * (len(case.actions) > 1)} without loss"
    if declared == "skip":
        how = "other weights change" if factor is None else f"changes x{factor:.2f}"
        raise Broken(
            f"{how} {company}: it counts them, and declares empty_sequence = 'skip'", "Count ~structure.empty", factor=factor
        )
    counted = {len(case.structure), *(len(np.unique(ids)) for ids in (case.structure.group_ids, case.structure.trajectory_ids))}
    allowed = sorted({each / (each + len(case.actions)) for each in counted})
    if factor is None or not any(np.isclose(factor, each) for each in allowed):
        how = "other weights change" if factor is None else f"changes x{factor:.2f}"
        raise Broken(
            f"{how} {company}: a mean over sequences, groups or trajectories changes x{' or x'.join(f'{each:.2f}' for each in allowed)}",
            "Count each of them once, or none",
            factor=factor,
        )


@promise("Negative loss weights are refused, or finite where it declares negative_weights", cases=_draw, first=_list_explicit)
def negative_weights(subject: Subject[Any], case: DrawnStructure) -> None:
    carrying = np.flatnonzero(case.structure.loss_weight)
    if not len(carrying):
        raise Inapplicable("no token carries loss")
    weight = case.structure.loss_weight.astype(np.float32)
    weight[carrying[0]] = -weight[carrying[0]]
    reducer = subject.make()
    takes = bool(getattr(reducer, "negative_weights", False))
    try:
        with blame(Owner.of_unrecorded(subject.label, "reducer"), "weights"):
            weights = reducer.weights(evolve(case.structure, loss_weight=weight))
    except DataError:
        if takes:
            raise Broken(
                "refuses a negative loss weight although it declares negative_weights", "Declare negative_weights = False"
            ) from None
        return
    except EngineError as error:
        raise Broken(
            f"fails with a negative loss weight: {error.cause}", "Raise DataError for it, or declare negative_weights"
        ) from error
    if not takes:
        raise Broken(
            "takes a negative loss weight, with which sums that it divides by may vanish",
            "Raise DataError for it, or declare negative_weights = True where nothing is divided",
        )
    if not np.isfinite(weights).all():
        raise Broken("is not finite with a negative loss weight", "Declare negative_weights = False")


# --- what it leaves alone ----------------------------------------------------------------------------------------------------------


@promise("It does not change the structure", cases=_draw)
def inputs_unchanged(subject: Subject[Any], case: DrawnStructure) -> None:
    names = ("loss_weight", "action_offsets", "group_ids", "unit_ids", "micro_batch", "sample_ids", "trajectory_ids")
    before = {name: getattr(case.structure, name).copy() for name in names}
    read = {name: values.copy() for name, values in {**case.structure.columns, **case.structure.sample_values}.items()}
    columns, values = (
        {name: read[name].copy() for name in mapping} for mapping in (case.structure.columns, case.structure.sample_values)
    )
    copy = evolve(case.structure, **{name: array.copy() for name, array in before.items()}, columns=columns, sample_values=values)
    _weights_or_undecidable(subject, copy)
    after = {name: getattr(copy, name) for name in names} | columns | values
    for name, array in (before | read).items():
        if not np.array_equal(array, after[name]):
            raise Broken(
                f"changes structure.{name} in place, from which the batch is cut afterwards", "Work on a copy: x / y, not x /= y"
            )


@promise("It gives the same weights for the same structure, in every call and whatever the random state", cases=_draw)
def repeatable(subject: Subject[Any], case: DrawnStructure) -> None:
    reducer = subject.make()
    with restore_random_state():
        results = []
        for seed in range(12):
            seed_everything(seed)
            before = global_random_state()
            try:
                results.append(token_weights(part_of(reducer, subject.label, "reducer"), case.structure))
            except EngineError as error:
                raise Undecidable(error.cause) from error
            if global_random_state() != before:
                raise Broken("draws from the global random state", "Let weights be a function of the structure alone")
    one = results[0]
    other = next((weights for weights in results if not np.array_equal(weights, one)), one)
    cause, remedy = "it keeps something, or draws numbers", "Let weights be a function of the structure alone"
    _require_same(one, other, "from one call to the next", cause, remedy)


def _answer(subject: Subject[Any], case: DrawnStructure) -> bytes:
    return _weights_or_undecidable(subject, case.structure).tobytes()


_process_settings, _another_rank, _another_process = process_promises(_answer, _draw, _list_explicit)

REDUCER_PROMISES: tuple[Promise[Any, Any], ...] = (
    _process_settings,  # first: once set they are set
    repeatable,  # soon: what wears off after some calls is seen while it lasts
    _another_rank,
    finite_weights,
    loss_weights_decide,
    oracle,
    micro_batch_split,
    sample_order,
    labels,
    additive,
    scale,
    weights_sum,
    empty_sequences,
    negative_weights,
    inputs_unchanged,
    _another_process,  # late: it takes seconds to start
    *PLUGIN_PROMISES,
)
