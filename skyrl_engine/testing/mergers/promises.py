"""Promises of every merger: merge(split(x)) == x for each kind of split, and no sample is silently lost, doubled or invented."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from skyrl_engine.contracts.values.outputs import PADDING_SAMPLE, BatchOutput, RankOutput, as_batch_output
from skyrl_engine.errors import EngineError, OutputError, ResultError
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.testing.comparison import excerpts
from skyrl_engine.testing.mergers.splits import (
    Split,
    grid,
    list_mini_batches,
    list_with_idle_rank,
    make_many,
    make_unsplit,
    make_with_fractions,
    splits,
)
from skyrl_engine.testing.mergers.spoilt import SpoiltSplit, draw_with_doubled, draw_with_missing, draw_with_unexpected
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.process_promises import process_promises
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, promise
from skyrl_engine.testing.subject import Subject


def _merge(subject: Subject[Any], case: Split) -> BatchOutput:
    with blame(Owner.of_unrecorded(subject.label, "merger"), "merge"):
        returned = subject.make().merge(case.outputs, case.plan)
    return as_batch_output(subject.label, returned)


def _merge_or_undecidable(subject: Subject[Any], case: Split) -> BatchOutput:
    try:
        return _merge(subject, case)
    except (EngineError, Broken) as error:
        raise Undecidable(str(error)) from error


def _has_same_samples(output: BatchOutput, case: Split) -> bool:
    return np.array_equal(np.sort(output.sample_ids), np.sort(case.whole.sample_ids))


def _merge_in_order(subject: Subject[Any], case: Split) -> BatchOutput:
    output = _merge_or_undecidable(subject, case)
    if not np.array_equal(output.sample_ids, case.whole.sample_ids):
        raise Undecidable("the samples are not those of the batch in its order")
    return output


def _require_samples(subject: Subject[Any], case: Split, where: str, remedy: str) -> None:
    """Raise Broken unless every sample comes back once; Undecidable where it does not either when one rank returns the whole batch."""
    if (wrong := _wrong_sample(_merge_or_undecidable(subject, case), case)) is None:
        return
    if _wrong_sample(_merge_or_undecidable(subject, make_unsplit(case.whole)), case) is not None:
        raise Undecidable("samples of a single rank do not come back either")
    raise Broken(f"{wrong} {where}", remedy)


def _wrong_sample(output: BatchOutput, case: Split) -> str | None:
    got, due = output.sample_ids.tolist(), case.whole.sample_ids.tolist()
    wrong = {
        "is missing": [sample for sample in due if sample not in got],
        "comes back twice": [sample for sample in due if got.count(sample) > 1],
        "was never planned": [sample for sample in got if sample not in due],
    }
    for how, ids in wrong.items():
        if ids:
            name = "padding" if ids[0] == PADDING_SAMPLE else f"sample {ids[0]}"
            return f"{name} {how}"
    return None


def _draw_splits(**options: Any) -> Callable[[Subject[Any]], st.SearchStrategy[Split]]:
    return lambda _subject: splits(**options)


def _list_many(_subject: Subject[Any]) -> list[Split]:
    return [make_many(), *list_with_idle_rank(), *list_mini_batches()]


def _list_with_metrics(_subject: Subject[Any]) -> list[Split]:
    return [make_many(), *list_with_idle_rank(), *grid()]


@promise(
    "It refuses no split that ranks may return",
    cases=_draw_splits(dp=3, replicas=True, padded=True, shuffled=True, mini_batches=3),
    effort=2,
    first=lambda subject: [*_list_many(subject), *grid()],
)
def answers(subject: Subject[Any], case: Split) -> None:
    try:
        _merge(subject, case)
    except EngineError as error:
        sizes = ", ".join(f"{name} {getattr(case.topology, name)}" for name in ("dp", "tp", "cp", "pp"))
        verb = "answers wrongly to" if isinstance(error, ResultError) else "refuses"
        raise Broken(f"{verb} the outputs of {sizes}: {error.cause}", error.remedy) from error


@promise("It returns every sample of one rank, cut into micro-batches or not", cases=_draw_splits())
def one_rank(subject: Subject[Any], case: Split) -> None:
    if (wrong := _wrong_sample(_merge_or_undecidable(subject, case), case)) is not None:
        raise Broken(f"{wrong} where one rank returns the whole batch", "Keep what the rank returns")


@promise("It returns every sample of every data-parallel rank", cases=_draw_splits(dp=3))
def every_rank(subject: Subject[Any], case: Split) -> None:
    _require_samples(
        subject, case, f"where {case.topology.dp} data-parallel ranks return their own", "Keep the outputs of all dp ranks"
    )


@promise("It returns the samples of all mini-batches", cases=_draw_splits(mini_batches=3))
def every_mini_batch(subject: Subject[Any], case: Split) -> None:
    where = f"where {len(case.plan.mini_batches)} mini-batches come in one call"
    _require_samples(subject, case, where, "Concatenate all outputs of a rank")


@promise("Tensor, context and pipeline replicas do not double a sample", cases=_draw_splits(replicas=True))
def replicas(subject: Subject[Any], case: Split) -> None:
    sizes = f"tp {case.topology.tp}, cp {case.topology.cp}, pp {case.topology.pp}"
    _require_samples(subject, case, f"under {sizes}", "Keep outputs with coords.collects, and no other")


@promise("Padding samples do not survive", cases=_draw_splits(padded=True))
def padding(subject: Subject[Any], case: Split) -> None:
    _require_samples(subject, case, "where ranks fill up with padding", "Drop samples of id PADDING_SAMPLE (-1)")


@promise(
    "Samples come back in the caller's order, whatever the plan's and that in which ranks answer",
    cases=_draw_splits(dp=2, shuffled=True),
)
def order(subject: Subject[Any], case: Split) -> None:
    output = _merge_or_undecidable(subject, case)
    if not _has_same_samples(output, case):
        raise Undecidable("the samples are not those of the batch")
    got, due = output.sample_ids.tolist(), case.whole.sample_ids.tolist()
    if got != due:
        place = next(place for place, (one, other) in enumerate(zip(got, due, strict=True)) if one != other)
        raise Broken(f"sample {got[place]} is at place {place}, where sample {due[place]} belongs", "Order by plan.expected_ids")


@promise("Every sample keeps its own values, bit for bit", cases=_draw_splits(dp=2, shuffled=True), first=_list_many)
def values(subject: Subject[Any], case: Split) -> None:
    output = _merge_in_order(subject, case)
    whole = case.whole
    if output.fields.keys() != whole.fields.keys():
        raise Broken(f"returns the fields {sorted(output.fields)} where ranks return {sorted(whole.fields)}", "Keep all fields")
    arrays = {
        "action_lengths": (output.action_lengths, whole.action_lengths),
        "scored": (output.scored.values, whole.scored.values),
        "scored.offsets": (output.scored.offsets, whole.scored.offsets),
        **{name: (output.fields[name].values, ragged.values) for name, ragged in whole.fields.items()},
        **{f"{name}.offsets": (output.fields[name].offsets, ragged.offsets) for name, ragged in whole.fields.items()},
    }
    for name, (got, due) in arrays.items():
        if got.dtype != due.dtype:
            raise Broken(f"{name} comes back as {got.dtype}, not {due.dtype}", "Concatenate and take; convert nothing")
        if got.tobytes() != due.tobytes():
            excerpt, expected_excerpt = excerpts(got, due)
            raise Broken(
                f"{name} is {excerpt} where the ranks returned {expected_excerpt}",
                "Take offsets and all fields along with the ids",
            )


@promise(
    "Metrics are reduced as they declare: sums added, means divided once, replicas counted once",
    cases=_draw_splits(dp=2, replicas=True, shuffled=True, mini_batches=2),
    first=_list_with_metrics,
)
def metrics(subject: Subject[Any], case: Split) -> None:
    output = _merge_or_undecidable(subject, case)
    for name, due in case.whole.metrics.items():
        if name not in output.metrics:
            raise Broken(f"the metric {name!r} is lost", "Combine metrics with contracts.outputs.combine_metrics")
        got = output.metrics[name]
        if got.reduction != due.reduction:
            raise Broken(
                f"the metric {name!r} comes back as a {got.reduction}, not as a {due.reduction}",
                "Keep the reduction that ranks declare: outputs of several batches are combined by it",
            )
        if not np.isclose(got.result, due.result, equal_nan=True):
            factor = got.result / due.result
            cause = "each part's mean counts alike" if due.reduction == "mean" else f"its parts do not combine by {due.reduction}"
            raise Broken(
                f"the metric {name!r} is {got.result:.6g} where its {due.reduction} is {due.result:.6g}: {cause}",
                "Combine metrics of collecting ranks with contracts.outputs.combine_metrics",
                factor=factor,
            )
        if due.reduction == "mean" and not np.isclose(got.count, due.count):
            raise Broken(
                f"the metric {name!r} is a mean over {got.count:g}, where ranks have {due.count:g}: with the next batch it would count as "
                f"{got.count:g}",
                "Keep the sums and counts of means apart, and divide at the end: contracts.outputs.combine_metrics",
            )


@promise("The order in which ranks answer changes no bit of a metric")
def arrival(subject: Subject[Any], _case: None) -> None:
    split = make_with_fractions()
    one, other = (_merge_or_undecidable(subject, variant).metrics for variant in (split, split.but(split.outputs[::-1])))
    for name, metric in one.items():
        if other[name] != metric:
            raise Broken(
                f"the metric {name!r} is {metric.result!r}, and {other[name].result!r} where ranks answer in another order: a run is not "
                "repeated bit for bit",
                "Sort outputs by coords.dp before they are combined",
            )


def _require_refusal(subject: Subject[Any], case: SpoiltSplit) -> None:
    """Raise Broken unless these outputs, of which something is wrong, are an OutputError; Undecidable where those of the split fail too."""
    _merge_or_undecidable(subject, case.split)
    try:
        _merge(subject, case.split.but(case.outputs))
    except OutputError:
        return
    except EngineError as error:
        raise Broken(f"fails where {case.what}: {error.cause}", "Raise OutputError, which lists ids and ranks") from error
    raise Broken(f"says nothing where {case.what}", "Raise OutputError, which lists ids and ranks")


@promise("A sample that no rank returns is an OutputError", cases=lambda _subject: draw_with_missing(dp=2, mini_batches=2))
def missing_samples(subject: Subject[Any], case: SpoiltSplit) -> None:
    _require_refusal(subject, case)


@promise("A sample that is returned twice is an OutputError", cases=lambda _subject: draw_with_doubled(dp=2, mini_batches=2))
def duplicated_samples(subject: Subject[Any], case: SpoiltSplit) -> None:
    _require_refusal(subject, case)


@promise("A sample that was never planned is an OutputError", cases=lambda _subject: draw_with_unexpected(dp=2, mini_batches=2))
def unexpected_samples(subject: Subject[Any], case: SpoiltSplit) -> None:
    _require_refusal(subject, case)


@promise("It does not change what ranks returned", cases=_draw_splits(dp=2, replicas=True, padded=True, shuffled=True))
def inputs_unchanged(subject: Subject[Any], case: Split) -> None:
    before = copy.deepcopy(case.outputs)
    _merge_or_undecidable(subject, case)
    for old, new in zip(before, case.outputs, strict=True):
        if _to_values(old) != _to_values(new):
            raise Broken(f"changes the output of rank {old.coords.rank} in place", "Work on copies")


def _to_values(output: RankOutput) -> list[Any]:
    """Return all that a rank returned as plain values, arrays as their bytes."""
    arrays = {"ids": output.sample_ids, "lengths": output.action_lengths}
    arrays |= {"scored": output.scored.values, "offsets": output.scored.offsets}
    fields = [(name, ragged.values.tobytes(), ragged.offsets.tobytes()) for name, ragged in output.fields.items()]
    # as text: a mean of nothing is NaN, which no NaN is equal to
    metrics = sorted(map(str, output.metrics.items()))
    return [fields, [array.tobytes() for array in arrays.values()], metrics, output.coords]


MERGES = 8
"""So many results are kept at a time: a merger may take turns with a few buffers."""
REPEATS = 12
"""So often the same outputs are merged once more: what a merger keeps grows."""


@promise(
    "What it returned stays as it is while it merges more, and the same outputs give the same again",
    cases=_draw_splits(dp=2, shuffled=True),
    effort=0.5,
)
def own_memory(subject: Subject[Any], case: Split) -> None:
    """One merger serves a whole run, and the caller keeps what it returned."""
    merger = subject.make()
    outputs, before, fresh = [], [], []
    try:
        for each in (case, *(_change_content(case, number) for number in range(1, MERGES))):
            outputs.append(merger.merge(each.outputs, each.plan))
            before.append(_batch_to_values(outputs[-1]))
            fresh.append(_batch_to_values(subject.make().merge(each.outputs, each.plan)))
        again = [_batch_to_values(merger.merge(case.outputs, case.plan)) for _ in range(REPEATS)]
    except Exception as error:
        raise Undecidable(f"it fails: {error}") from error
    if [_batch_to_values(each) for each in outputs] != before:
        raise Broken("changes what it returned before when it merges the next batch", "Return memory of its own from every call")
    if any(each != before[0] for each in again):
        raise Broken("merges the same outputs otherwise a second time", "Keep nothing between calls")
    if before != fresh:
        raise Broken("merges other outputs otherwise than a merger that has merged nothing yet", "Keep nothing between calls")


def _change_content(case: Split, number: int) -> Split:
    """Return the split with every rank's samples in another order, and with this number as all their values."""
    other = case.but([original.take(np.roll(np.arange(len(original.sample_ids)), number)) for original in case.outputs])
    for output in other.outputs:
        for ragged in output.fields.values():
            ragged.values[:] = number + 6
    return other


def _batch_to_values(output: BatchOutput) -> list[Any]:
    return _to_values(RankOutput(output.sample_ids, output.action_lengths, output.scored, output.fields, output.metrics))


def _answer(subject: Subject[Any], case: Split) -> list[Any]:
    return _batch_to_values(_merge_or_undecidable(subject, case))


_process_settings, _another_rank, _another_process = process_promises(
    _answer, _draw_splits(dp=2, padded=True, shuffled=True, mini_batches=2), _list_many
)

MERGER_PROMISES: tuple[Promise[Any, Any], ...] = (
    _process_settings,  # first: once set they are set
    own_memory,  # soon: what wears off after some calls is seen while it lasts
    _another_rank,
    answers,
    one_rank,
    every_rank,
    every_mini_batch,
    replicas,
    padding,
    order,
    values,
    metrics,
    arrival,
    missing_samples,
    duplicated_samples,
    unexpected_samples,
    inputs_unchanged,
    _another_process,  # late: it takes seconds to start
    *PLUGIN_PROMISES,
)
