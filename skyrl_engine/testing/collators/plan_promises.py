"""Promises about a collator's plans: which samples share a row, a micro-batch, a rank and a mini-batch."""

from itertools import pairwise
from typing import Any, get_args

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.kinds.collator import Carried, declared_extras
from skyrl_engine.contracts.values.plan import BatchPlan, RowKind
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.errors import DataError, EngineError, UnsupportedError
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.testing.collators.cases import Planning, plan_case, plan_with, plannings, require, row_samples
from skyrl_engine.testing.collators.explicit import list_explicit_plannings
from skyrl_engine.testing.collators.strategies import largest_bundle
from skyrl_engine.testing.promise import Broken, Inapplicable, Promise, promise
from skyrl_engine.testing.subject import CONTEXT, Subject


@promise(
    "Every sample is planned exactly once, and the plan keeps the caller's sample ids",
    cases=plannings,
    first=list_explicit_plannings,
)
def samples_once(subject: Subject[Any], case: Planning) -> None:
    plan, lengths = plan_case(subject, case), case.lengths
    planned = np.concatenate([np.zeros(0, dtype=np.int64), *(micro_batch.samples for micro_batch in plan.micro_batches)])
    times = np.bincount(planned, minlength=len(lengths))
    wrong = np.flatnonzero(times != 1).tolist()
    require(
        not wrong,
        f"sample {wrong[:1]} of {len(lengths)} is planned {times[wrong[:1]]} times",
        "Put every position of the batch into one row",
    )
    require(
        np.array_equal(plan.sample_ids, lengths.sample_ids),
        "sample_ids are not the batch's, in its order",
        "Pass lengths.sample_ids on",
    )


@promise("No mini-batch cuts a group, and no micro-batch cuts a unit", cases=plannings, first=list_explicit_plannings, effort=3)
def groups_and_units(subject: Subject[Any], case: Planning) -> None:
    plan, lengths = plan_case(subject, case), case.lengths
    mini_batches = [mini_batch.samples for mini_batch in plan.mini_batches]
    _require_whole(mini_batches, lengths.group_ids, "group", "mini-batches")
    _require_whole([micro_batch.samples for micro_batch in plan.micro_batches], lengths.unit_ids, "unit", "micro-batches")


def _require_whole(parts: list[IntArray], labels: IntArray, name: str, parts_name: str) -> None:
    seen: set[int] = set()
    for part in parts:
        inside = set(labels[part].tolist())
        shared = sorted(inside & seen)
        require(
            not shared, f"{name} {shared[:1]} is cut over {parts_name}", f"Deal out whole {name}s: contracts.Bundles, inseparable"
        )
        seen |= inside


@promise(
    "Every mini-batch has a part for each data-parallel rank, and all parts have equally many micro-batches",
    cases=plannings,
    first=list_explicit_plannings,
)
def ranks_in_step(subject: Subject[Any], case: Planning) -> None:
    remedy = "Fill up with micro-batches of one empty row"
    for mini_batch in plan_case(subject, case).mini_batches:
        require(
            len(mini_batch.ranks) == case.layout.dp,
            f"a mini-batch has {len(mini_batch.ranks)} parts for {case.layout.dp} data-parallel ranks",
            remedy,
        )
        counts = [len(rank) for rank in mini_batch.ranks]
        require(len(set(counts)) == 1, f"ranks have {counts} micro-batches, so some wait for ever for the others", remedy)


@promise(
    "Mini-batches and micro-batches stay within the layout's samples, rows and tokens",
    cases=plannings,
    first=list_explicit_plannings,
)
def sizes(subject: Subject[Any], case: Planning) -> None:
    plan, layout = plan_case(subject, case), case.layout
    for mini_batch in plan.mini_batches:
        count = len(mini_batch.samples)
        require(
            layout.mini_batch_size is None or count <= layout.mini_batch_size,
            f"a mini-batch has {count} samples where {layout.mini_batch_size} are allowed",
            "Cut by layout.mini_batch_size",
        )
    for micro_batch in plan.micro_batches:
        require(
            layout.micro_batch_rows is None or micro_batch.rows <= layout.micro_batch_rows,
            f"a micro-batch has {micro_batch.rows} rows where {layout.micro_batch_rows} are allowed",
            "Cut by layout.micro_batch_rows",
        )
        require(
            layout.micro_batch_tokens is None or micro_batch.dense_tokens <= layout.micro_batch_tokens,
            f"a micro-batch has {micro_batch.dense_tokens} tokens, padding included, where {layout.micro_batch_tokens} are allowed",
            "Cut by layout.micro_batch_tokens, which counts rows x width",
        )


@promise(
    "Rows are well formed: int64 offsets that rise from 0, one row and one column at least, and room for every token that is not shared",
    cases=plannings,
    first=list_explicit_plannings,
)
def rows(subject: Subject[Any], case: Planning) -> None:
    tokens = case.lengths.tokens
    remedy = "Row r holds samples[row_offsets[r]:row_offsets[r + 1]], which together are no longer than width"
    for micro_batch in plan_case(subject, case).micro_batches:
        offsets = micro_batch.row_offsets
        dtypes = {micro_batch.samples.dtype.name, offsets.dtype.name}
        require(dtypes == {"int64"}, f"samples and row_offsets are {sorted(dtypes)}, not int64", remedy)
        spans = len(offsets) > 0 and (offsets[0], offsets[-1]) == (0, len(micro_batch.samples)) and (np.diff(offsets) >= 0).all()
        require(spans, f"row_offsets {offsets.tolist()} do not rise from 0 to {len(micro_batch.samples)}", remedy)
        require(micro_batch.rows >= 1, "a micro-batch has no row", "Give it an empty one")
        require(micro_batch.width >= 1, "a row has no column", "Give it one")
        for start, stop in pairwise(offsets.tolist()):
            held = int(tokens[micro_batch.samples[start:stop]].sum())
            if micro_batch.shared is not None:
                held -= int(micro_batch.shared[start:stop].sum())
            require(held <= micro_batch.width, f"samples of {held} tokens share a row of {micro_batch.width}", remedy)


def _exempt_without_limit(subject: Subject[Any]) -> str | None:
    return "a bare product knows no run's limit" if subject.plugin is None else None


@promise(
    "A sample longer than the run's limit is refused in words, or planned as others are",
    cases=plannings,
    first=list_explicit_plannings,
    effort=0.2,
    exempt=_exempt_without_limit,
)
def overlong(subject: Subject[Any], case: Planning) -> None:
    assert subject.plugin is not None, "exempt"
    longest = int(case.lengths.tokens.max(initial=0))
    if longest < 2:
        raise Inapplicable("no sample is longer than a token")
    plan_case(subject, case)
    collator = subject.plugin.make(evolve(CONTEXT, max_sequence_length=longest - 1))
    try:
        with blame(Owner.of_unrecorded(subject.label, "collator"), "plan"):
            plan = collator.plan(case.lengths, case.layout)
    except DataError:
        return
    except EngineError as failed:
        raise Broken(failed.cause, "Raise DataError, which names the sample") from failed
    times = np.bincount(plan.joined.samples, minlength=len(case.lengths))
    wrong = np.flatnonzero(times != 1).tolist()
    require(
        not wrong,
        f"sample {wrong[:1]} is planned {times[wrong[:1]]} times where context.max_sequence_length is {longest - 1}",
        "Raise DataError for it, or plan it: what is left out silently is missing from means",
    )


@promise(
    "A sample of more tokens than a micro-batch may hold, and a group of more samples than a mini-batch may, are refused in words",
    cases=plannings,
    first=list_explicit_plannings,
    effort=0.2,
)
def nowhere(subject: Subject[Any], case: Planning) -> None:
    longest, largest = int(case.lengths.tokens.max(initial=0)), largest_bundle(case.lengths, groups=True)
    without = evolve(case.layout, micro_batch_rows=None, micro_batch_tokens=None, mini_batch_size=None)
    tight = {
        f"a sample of {longest} tokens where a micro-batch holds {longest - 1}": evolve(
            without, micro_batch_tokens=longest - 1 or None
        ),
        f"{largest} samples that groups and units keep together where a mini-batch holds {largest - 1}": evolve(
            without, mini_batch_size=largest - 1 or None
        ),
    }
    layouts = {what: layout for what, layout in tight.items() if layout != without}
    if not layouts:
        raise Inapplicable("no sample or group is larger than one")
    for what, layout in layouts.items():
        try:
            with blame(Owner.of_unrecorded(subject.label, "collator"), "plan"):
                subject.make().plan(case.lengths, layout)
        except (DataError, UnsupportedError):
            continue
        except EngineError as failed:
            raise Broken(failed.cause, "Raise DataError, which names the sample") from failed
        raise Broken(f"plans {what}", "Raise DataError for what fits nowhere, UnsupportedError for a layout that you cannot make")


@promise(
    "It keeps what it declares: `padded` rows hold one sample at most, and `carries` names capabilities",
    cases=plannings,
    first=list_explicit_plannings,
)
def declarations(subject: Subject[Any], case: Planning) -> None:
    collator = subject.make()
    kinds = get_args(RowKind)
    require(collator.rows in kinds, f"rows is {collator.rows!r}", f"Declare rows as one of {', '.join(kinds)}")
    unknown = sorted(declared_extras(collator) - {*get_args(Carried)})
    require(not unknown, f"carries names {', '.join(unknown)}", f"Declare in carries some of {', '.join(get_args(Carried))}")
    if collator.rows == "padded":
        for micro_batch in plan_case(subject, case).micro_batches:
            most = max(map(len, row_samples(micro_batch)))
            require(most <= 1, f"a row holds {most} samples where padded rows are declared", 'Declare rows = "packed"')
    if collator.rows != "tree":
        for micro_batch in plan_case(subject, case).micro_batches:
            require(micro_batch.shared is None, "a plan shares prefixes where no trees are declared", 'Declare rows = "tree"')


CALLS = 4
"""So often the same lengths are planned once more: what a collator keeps may grow."""


@promise("The same lengths give the same plan, whatever was planned before", cases=plannings, first=list_explicit_plannings)
def same_plan(subject: Subject[Any], case: Planning) -> None:
    one, other = (_to_lists(plan_case(subject, case)) for _ in range(2))
    remedy = "Let plans be functions of lengths and layout alone"
    require(one == other, "planning the same lengths twice gives two plans", remedy)
    collator = subject.make()
    lengths = case.lengths
    turned = evolve(lengths, tokens=lengths.tokens[::-1].copy(), actions=lengths.actions[::-1].copy(), prefixes=None)
    plan_with(collator, subject.label, Planning(turned, case.layout))
    for _ in range(CALLS):
        repeated = plan_with(collator, subject.label, case)
        require(_to_lists(repeated) == one, "after other lengths the same lengths give another plan", remedy)
    own_ids = np.arange(len(lengths), dtype=np.int64)
    # whatever fits in groups and units fits without them
    loose = Planning(evolve(lengths, group_ids=own_ids, unit_ids=own_ids, sample_ids=lengths.sample_ids[::-1] + 1), case.layout)
    expected, replanned = plan_case(subject, loose), plan_with(collator, subject.label, loose)
    require(
        _to_lists(replanned) == _to_lists(expected) and np.array_equal(replanned.sample_ids, expected.sample_ids),
        "samples of the same lengths under other ids, groups and units get another plan than from a collator that planned nothing before",
        "Keep nothing between plans, or look at all that lengths holds",
    )


def _to_lists(plan: BatchPlan) -> list[Any]:
    """Return the plan in plain lists."""
    return [
        [
            [
                (
                    micro_batch.samples.tolist(),
                    micro_batch.row_offsets.tolist(),
                    micro_batch.width,
                    micro_batch.action_width,
                    micro_batch.alignment,
                    None if micro_batch.shared is None else micro_batch.shared.tolist(),
                )
                for micro_batch in rank
            ]
            for rank in mini_batch.ranks
        ]
        for mini_batch in plan.mini_batches
    ]


PLAN_PROMISES: tuple[Promise[Any, Any], ...] = (
    samples_once,
    groups_and_units,
    ranks_in_step,
    sizes,
    rows,
    overlong,
    nowhere,
    declarations,
)
