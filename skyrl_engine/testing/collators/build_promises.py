"""Promises about the dense tensors of a collator: tokens, gather index, bounds, fields, and memory of their own."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.collator import MODEL_INPUTS, DenseBatch
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import BuildOrder, Layout, MicroBatchPlan
from skyrl_engine.contracts.values.prefixes import PrefixTree
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.testing.collators.cases import (
    CutCase,
    Planning,
    build_rows,
    build_with,
    builds,
    cuts,
    plan_case,
    plan_with,
    require,
    require_same_field,
    require_same_fields,
    row_samples,
    token_places,
)
from skyrl_engine.testing.collators.explicit import list_explicit_and_wide, list_explicit_cuts
from skyrl_engine.testing.collators.strategies import COLUMN_NAMES
from skyrl_engine.testing.comparison import excerpts
from skyrl_engine.testing.promise import Broken, Promise, promise
from skyrl_engine.testing.subject import Subject

MODEL_FIELDS = ("input_ids", "attention_mask", "position_ids")


@promise(
    "Every row holds its samples' tokens in order, positions count from 0 in each, and their true lengths are given",
    cases=cuts(),
    first=list_explicit_cuts,
)
def tokens(subject: Subject[Any], case: CutCase) -> None:
    for micro_batch, batch in builds(subject, case):
        _require_tokens(case.columns, micro_batch, batch)


def _require_tokens(columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch) -> None:
    shape, remedy = (micro_batch.rows, micro_batch.width), "Write the tokens of micro_batch.samples into rows of micro_batch.width"
    missing = [name for name in MODEL_FIELDS if name not in batch.fields]
    require(not missing, f"{', '.join(missing)} are missing", remedy)
    ids, mask, positions = (batch[name].numpy() for name in MODEL_FIELDS)
    for name, array in zip(MODEL_FIELDS, (ids, mask, positions), strict=True):
        require(array.dtype == np.int64, f"{name} is {array.dtype}, not int64", remedy)
        require(array.shape == shape, f"{name} has shape {array.shape} where the plan says {shape}", remedy)
    for name, array in (("input_ids", ids), ("position_ids", positions)):
        require(array.min() >= 0, f"{name} holds {array.min()}, which no table of a model has", "Pad with the pad token, or with 0")
    require(np.isin(mask, (0, 1)).all(), "attention_mask holds other numbers than 0 and 1", remedy)
    require(len(batch.sequence_lengths) == micro_batch.rows, "sequence_lengths have not one entry per row", remedy)
    nothing = np.zeros(0, dtype=np.int64)
    places = [nothing] * micro_batch.rows
    if batch.tree is not None:
        for _, row, own in token_places(batch, columns, micro_batch):
            require(own.max() < micro_batch.width, f"segments of row {row} reach beyond its {micro_batch.width} columns", remedy)
            places[row] = np.concatenate([places[row], own])
    for row, (start, stop) in enumerate(pairwise(micro_batch.row_offsets.tolist())):
        parts = [
            columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]]
            for sample in micro_batch.samples[start:stop].tolist()
        ]
        # tokens that several samples share are read once for each of them
        real = places[row] if batch.tree is not None else np.flatnonzero(mask[row])
        expected, got = np.concatenate([nothing, *parts]).tolist(), ids[row][real].tolist()
        if got != expected:
            excerpt, expected_excerpt = excerpts(np.asarray(got), np.asarray(expected))
            raise Broken(f"row {row} holds the tokens {excerpt} where its samples have {expected_excerpt}", remedy)
        counted, got = [place for part in parts for place in range(len(part))], positions[row][real].tolist()
        if got != counted:
            excerpt, expected_excerpt = excerpts(np.asarray(got), np.asarray(counted))
            raise Broken(f"positions of row {row} are {excerpt}, not {expected_excerpt}", "Count from 0 in every sample")
        lengths = batch.sequence_lengths[row]
        require(
            lengths.dtype == np.int64 and lengths.tolist() == list(map(len, parts)),
            f"sequence_lengths of row {row} are {lengths.dtype} {lengths.tolist()} for samples of {list(map(len, parts))} tokens",
            "Return Ragged(lengths_of_samples, micro_batch.row_offsets)",
        )


@promise(
    "The gather index scores every response token from its predecessor, in its sample's row, and no other place",
    cases=cuts(),
    first=list_explicit_cuts,
)
def predecessors(subject: Subject[Any], case: CutCase) -> None:
    for micro_batch, batch in builds(subject, case):
        _require_predecessors(case.columns, micro_batch, batch)


def _require_predecessors(columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch) -> None:
    ids, mask, gather = batch["input_ids"].numpy(), batch["attention_mask"].numpy(), batch.gather
    remedy = "Give each response token with a predecessor one entry: its place on the action axis, its row, and the column before its own"
    expected = _list_scored_tokens(columns, micro_batch)
    for name in ("actions", "rows", "columns"):
        array = getattr(gather, name)
        require(array.dtype == np.int64, f"gather.{name} is {array.dtype}, not int64", remedy)
        require(
            array.shape == (len(expected),), f"gather.{name} has shape {array.shape} for {len(expected)} tokens to score", remedy
        )
    places = list(zip(gather.actions.tolist(), gather.rows.tolist(), gather.columns.tolist(), strict=True))
    if batch.tree is not None:
        _require_predecessors_in_trees(columns, micro_batch, batch, places, remedy)
        return
    require(len({(row, column) for _, row, column in places}) == len(places), "two response tokens are scored at one place", remedy)
    for (place, row, column), (action, own_row, predecessor, token) in zip(places, expected, strict=True):
        entry = f"the entry for action {place} in row {row}, column {column}"
        require((place, row) == (action, own_row), f"{entry} stands where action {action} in row {own_row} is due", remedy)
        require(0 <= column < ids.shape[1] - 1, f"{entry} lies outside what can predict", remedy)
        require(mask[row, column] == 1 and mask[row, column + 1] == 1, f"{entry} lies on padding", remedy)
        require(
            (ids[row, column], ids[row, column + 1]) == (predecessor, token),
            f"{entry} reads {ids[row, column]} before {ids[row, column + 1]}, where {predecessor} stands before {token}",
            remedy,
        )


def _require_predecessors_in_trees(
    columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch, places: list[tuple[int, int, int]], remedy: str
) -> None:
    expected, action = [], 0
    for sample, row, path in token_places(batch, columns, micro_batch):
        actions = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
        for position in range(len(path) - actions, len(path)):
            if position > 0:
                expected.append((action, row, int(path[position - 1])))
            action += 1
    for got, due in zip(places, expected, strict=True):
        require(
            got == due,
            f"the gather index scores (action, row, column) {got} where {due} is due, the place of the token before",
            remedy,
        )


def _list_scored_tokens(columns: SampleColumns, micro_batch: MicroBatchPlan) -> list[tuple[int, int, int, int]]:
    """Return (action, row, predecessor, token) of every response token that has a predecessor."""
    entries, action = [], 0
    for row, samples in enumerate(row_samples(micro_batch)):
        for sample in samples:
            ids = columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]].tolist()
            actions = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
            for position in range(len(ids) - actions, len(ids)):
                if position > 0:
                    entries.append((action, row, ids[position - 1], ids[position]))
                action += 1
    return entries


@promise(
    "Rows of several samples have `cu_seqlens`, which bound each sample at its alignment", cases=cuts(), first=list_explicit_cuts
)
def bounds(subject: Subject[Any], case: CutCase) -> None:
    joined = plan_case(subject, case.planning).joined  # its rows have different lengths
    for micro_batch, batch in [*builds(subject, case), (joined, build_rows(subject, case.columns, joined))]:
        _require_bounds(case.columns, micro_batch, batch)


def _require_bounds(columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch) -> None:
    remedy = "Give int32 columns in which the samples begin, and the end of the last; each on a multiple of micro_batch.alignment"
    if batch.tree is not None:
        require(
            batch.cu_seqlens is None,
            "rows of trees have cu_seqlens, and their samples lie in more than one piece",
            "Leave them out",
        )
        return
    if batch.cu_seqlens is None:
        require(max(map(len, row_samples(micro_batch))) <= 1, "a row of several samples has no cu_seqlens", remedy)
        return
    require(len(batch.cu_seqlens) == micro_batch.rows, "cu_seqlens have not one entry per row", remedy)
    lengths, mask = np.diff(columns.token_offsets), batch["attention_mask"].numpy()
    for row, (samples, ends) in enumerate(zip(row_samples(micro_batch), batch.cu_seqlens, strict=True)):
        label = f"cu_seqlens of row {row} are {ends.dtype} {ends.tolist()}"
        require(ends.dtype == np.int32 and ends.shape == (len(samples) + 1,), f"{label} for {len(samples)} samples", remedy)
        require(ends[0] == 0 and ends[-1] <= micro_batch.width, f"{label} in a row of {micro_batch.width} columns", remedy)
        real = np.zeros(micro_batch.width, dtype=np.int64)
        for sample, (begin, end) in zip(samples, pairwise(ends.tolist()), strict=True):
            require(begin + lengths[sample] <= end, f"{label} and cut sample {sample} of {lengths[sample]} tokens", remedy)
            expected = -(-int(lengths[sample]) // micro_batch.alignment) * micro_batch.alignment
            require(
                end - begin == expected,
                f"{label} where sample {sample} of {lengths[sample]} tokens takes {expected} columns at the alignment {micro_batch.alignment}",
                remedy,
            )
            real[begin : begin + lengths[sample]] = 1
        require(np.array_equal(mask[row], real), f"{label}, but its tokens lie elsewhere", remedy)


def _exempt_without_trees(subject: Subject[Any]) -> str | None:
    return None if subject.make().rows == "tree" else "its rows share no prefixes"


@promise(
    "Rows of trees are their segments from column 0 on, descendants without a gap; samples share the columns that the plan says, no others",
    cases=cuts(),
    first=list_explicit_cuts,
    exempt=_exempt_without_trees,
)
def trees(subject: Subject[Any], case: CutCase) -> None:
    for micro_batch, batch in builds(subject, case):
        require(batch.tree is not None, "build returned no tree", "Return DenseBatch(tree=PrefixTree(...))")
        assert batch.tree is not None
        _require_trees(case.columns, micro_batch, batch, batch.tree)


def _require_trees(columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch, tree: PrefixTree) -> None:
    remedy = "Lay every sample's tokens that the one before does not have end to end, and cut them where later samples leave"
    require(len(tree.lengths) == micro_batch.rows, "the tree has not one entry per row", remedy)
    mask = batch["attention_mask"].numpy()
    for row in range(micro_batch.rows):
        total = int(tree.lengths[row].sum())
        real = np.arange(micro_batch.width) < total
        require(
            np.array_equal(mask[row] == 1, real), f"segments of row {row} have {total} tokens, and the mask marks others", remedy
        )
        parents = tree.parents[row].tolist()
        above: list[int] = []  # the path to the segment before
        for segment, parent in enumerate(parents):
            while above and above[-1] != parent:
                above.pop()
            require(
                parent < 0 or above,
                f"parents of row {row} are {parents}: segment {segment} is no neighbour of its parent's",
                remedy,
            )
            above.append(segment)
    shared = np.zeros_like(micro_batch.samples) if micro_batch.shared is None else micro_batch.shared
    before: tuple[int, set[int]] = (-1, set())
    for place, (sample, row, path) in enumerate(token_places(batch, columns, micro_batch)):
        own = {*path.tolist()}
        common = len(own & before[1]) if row == before[0] else 0
        require(
            common == shared[place],
            f"sample {sample} has {common} columns of row {row} in common with the one before, the plan says {int(shared[place])}",
            remedy,
        )
        before = row, own


@promise(
    "Loss weights and columns hold the samples' numbers at their response tokens, bit for bit, and 0 everywhere else",
    cases=cuts(),
    first=list_explicit_and_wide,
)
def numbers(subject: Subject[Any], case: CutCase) -> None:
    for micro_batch, batch in builds(subject, case):
        for name, values in {"loss_weight": case.columns.loss_weight, **case.columns.columns}.items():
            if name in batch.fields:
                expected = values if values.ndim > 1 else np.asarray(values, dtype=np.float32)
                _require_numbers(name, expected, case.columns, micro_batch, batch)


def _require_numbers(name: str, values: AnyArray, columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch) -> None:
    remedy = (
        "Give [rows, width] at the tokens, [rows, width - 1] one column before, as the gather index has it, or [rows, action_width] with "
        "each row's numbers at one end or where response_mask is 1; k numbers per token as one more axis"
    )
    array = batch[name].numpy()
    require(array.dtype == values.dtype, f"{name} is {array.dtype}, not {values.dtype}", remedy)
    forms = [form for form in _forms(values, columns, micro_batch, batch) if form.shape == array.shape]
    widths = f"width {micro_batch.width} and action width {micro_batch.action_width}"
    require(forms, f"{name} has shape {array.shape} in {micro_batch.rows} rows of {widths}", remedy)
    require(
        any(form.tobytes() == np.ascontiguousarray(array).tobytes() for form in forms),
        f"{name} is\n{array}\nnot\n{forms[0]}",
        remedy,
    )


def _forms(values: AnyArray, columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch) -> Iterator[AnyArray]:
    """Yield the numbers of response tokens as rows may hold them."""
    rows, width, action_width = micro_batch.rows, micro_batch.width, micro_batch.action_width
    tail = values.shape[1:]  # the k of a column of k numbers per token
    at_tokens, before = (np.zeros((rows, size, *tail), values.dtype) for size in (width, max(width - 1, 0)))
    of_rows: list[list[AnyArray]] = [[] for _ in range(rows)]
    for sample, row, places in token_places(batch, columns, micro_batch):
        own = values[columns.action_offsets[sample] : columns.action_offsets[sample + 1]]
        of_rows[row].append(own)
        first = len(places) - len(own)
        at_tokens[row, places[first:]] = own
        # nothing comes before the first token of a sample
        scored = max(first, 1)
        before[row, places[scored:] - 1] = own[scored - first :]
    yield before
    yield at_tokens
    nothing = np.zeros((0, *tail), values.dtype)
    lines = [np.concatenate([nothing, *parts]) for parts in of_rows]
    if max(map(len, lines), default=0) > action_width:
        return
    if "response_mask" in batch.fields:
        mask = batch["response_mask"].numpy() == 1
        if mask.sum(1).tolist() == list(map(len, lines)):
            masked = np.zeros((*mask.shape, *tail), values.dtype)
            masked[mask] = np.concatenate([nothing, *lines])
            yield masked
        return
    for right in (True, False):
        aligned = np.zeros((rows, action_width, *tail), values.dtype)
        for row, line in enumerate(lines):
            aligned[row, action_width - len(line) if right else 0 :][: len(line)] = line
        yield aligned


def _no_reference(subject: Subject[Any]) -> str | None:
    return None if "reference" in subject.hooks else "there is no reference to compare with"


EVERY = ("router_replay", "vision")


@promise(
    "Every field is the reference's bit for bit: value, dtype, shape and contiguity, with NaN, -0.0, denormals and ids beyond 32 bits",
    cases=cuts(*EVERY),
    first=list_explicit_cuts,
    exempt=_no_reference,
)
def reference(subject: Subject[Any], case: CutCase) -> None:
    for micro_batch, batch in builds(subject, case):
        require_same_fields(batch, subject.hooks["reference"](case.columns, micro_batch), "Compare with the reference")


@promise("A row is the same, bit for bit, whatever rows are built with it", cases=cuts(*EVERY), first=list_explicit_cuts)
def rows_alone(subject: Subject[Any], case: CutCase) -> None:
    """A row depends on its own samples alone: micro-batches are pieces of the whole plan's build, and every plan gives equal rows."""
    remedy = "Let a row depend on its samples, the width and the alignment alone"
    plan = plan_case(subject, case.planning)
    one_rank = plan_case(subject, Planning(case.planning.lengths, Layout())).joined
    joined = plan.joined
    width = {name: max(getattr(whole_plan, name) for whole_plan in (joined, one_rank)) for name in ("width", "action_width")}
    whole = build_rows(subject, case.columns, evolve(joined, **width))
    parts = [build_rows(subject, case.columns, evolve(micro_batch, **width)) for micro_batch in plan.micro_batches]
    require_same_fields(whole, {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0].fields}, remedy)
    if one_rank.alignment != joined.alignment:
        return
    other = build_rows(subject, case.columns, evolve(one_rank, **width))
    places = {samples: row for row, samples in enumerate(row_samples(one_rank))}
    for row, samples in enumerate(row_samples(joined)):
        if samples in places:
            for name in whole.fields.keys() - whole.ragged_offsets.keys():
                require_same_field(name, whole[name][row].numpy(), other[name][places[samples]].numpy(), remedy)


@frozen(eq=False)
class FieldChoice:
    """A cut and a choice of fields: bit i asks for the i-th field by name."""

    cut: CutCase
    bits: int

    def __str__(self) -> str:
        return str(self.cut)

    def of(self, names: Iterable[str]) -> list[str]:
        return [name for place, name in enumerate(sorted(names)) if self.bits >> place & 1]


def _draw_asked_fields(subject: Subject[Any]) -> st.SearchStrategy[FieldChoice]:
    return st.builds(FieldChoice, cuts(*EVERY)(subject), st.integers(0, 2**20 - 1))


@promise(
    "It builds the fields that are asked for, all there are where none is named, and no column that the samples do not have",
    cases=_draw_asked_fields,
)
def fields(subject: Subject[Any], case: FieldChoice) -> None:
    remedy = "Build the fields that are named and there; everything there is where fields is None"
    columns = case.cut.columns
    for micro_batch, everything in builds(subject, case.cut):
        for name in COLUMN_NAMES:
            require(
                (name in everything.fields) == (name in columns.columns),
                f"column {name!r} is {'left out' if name in columns.columns else 'invented'}",
                remedy,
            )
        names = case.of(everything.fields)
        absent = [name for name in COLUMN_NAMES if name not in columns.columns]
        subset = build_rows(subject, columns, micro_batch, fields=[*names, *absent, "a_field_nobody_has"])
        require_same_fields(subset, {name: everything[name].numpy() for name in names}, remedy)
        require(
            subset.ragged_offsets.keys() == everything.ragged_offsets.keys() & {*names},
            "ragged_offsets are of other fields",
            remedy,
        )
        for name in ("actions", "rows", "columns"):
            require_same_field(f"gather.{name}", getattr(subset.gather, name), getattr(everything.gather, name), remedy)


@promise(
    "What it built stays as it is while it builds more, and the same rows give the same bytes again",
    cases=cuts(*EVERY),
    first=list_explicit_cuts,
)
def own_memory(subject: Subject[Any], case: CutCase) -> None:
    """Every build has memory of its own: pipelines hold several micro-batches at a time, and autograd keeps them until backward."""
    collator = subject.make()
    plan = list(plan_case(subject, case.planning).micro_batches)
    first, first_copies = [], []
    for micro_batch in plan:
        batch = build_with(collator, subject.label, case.columns, micro_batch)
        _require_own(batch, case.columns)
        first.append(batch)
        first_copies.append(copy_arrays(batch))
    later_copies = [copy_arrays(build_with(collator, subject.label, case.columns, micro_batch)) for micro_batch in plan]
    for batch, copies, later in zip(first, first_copies, later_copies, strict=True):
        require(
            copies.keys() == later.keys(),
            "the same rows give other fields when they are built again",
            "Keep nothing between builds",
        )
        for name, array in copy_arrays(batch).items():
            require_same_field(f"{name}, after later builds,", array, copies[name], "Return memory of its own from every build")
            require_same_field(f"{name}, built again,", later[name], copies[name], "Keep nothing between builds")
    one, other = (build_with(collator, subject.label, case.columns, plan[0]) for _ in range(2))
    for name, tensor in one.fields.items():
        require(
            not np.may_share_memory(tensor.numpy(), other[name].numpy()) or name in one.ragged_offsets,
            f"{name} is the same memory where the same rows are built twice",
            "Return memory of its own from every build: a backend may write into it",
        )


@promise(
    "Rows are the same, bit for bit, in whatever order they are built, and after other samples of the same lengths",
    cases=cuts(*EVERY),
    first=list_explicit_cuts,
    effort=0.3,
)
def build_order(subject: Subject[Any], case: CutCase) -> None:
    """A rank asks for what the model eats in the order of its plan, of which a collator may prepare some ahead."""
    columns, collator = case.columns, subject.make()
    for mini_batch in plan_case(subject, case.planning).mini_batches:
        for rank in mini_batch.ranks:
            ordered = BuildOrder.of(rank)
            wider = tuple(evolve(rows, width=rows.width + rows.alignment) for rows in ordered[1:])
            turns = (
                (ordered, "in the order of the plan"),
                (ordered, "after other samples of the same lengths"),
                (ordered[::-1], "in the other order"),
                ((*ordered[:1], *wider), "as changed copies of the plan"),
            )
            for number, (turn, when) in enumerate(turns):
                samples = evolve(columns, input_ids=columns.input_ids ^ number)  # the memory of samples before may be taken again
                batches = [build_with(collator, subject.label, samples, rows, fields=MODEL_INPUTS) for rows in turn]
                for micro_batch, batch in zip(turn, batches, strict=True):
                    alone = evolve(micro_batch, order=None)
                    _require_copies(batch, copy_arrays(build_rows(subject, samples, alone, fields=MODEL_INPUTS)), when)


def _require_copies(batch: DenseBatch, expected: Mapping[str, AnyArray], when: str) -> None:
    arrays, remedy = (
        copy_arrays(batch),
        "Let what is prepared ahead belong to these samples and this very plan (micro_batch.following)",
    )
    require(arrays.keys() == expected.keys(), f"built {when}, rows have other fields than built alone", remedy)
    for name, array in expected.items():
        require_same_field(f"{name}, built {when},", arrays[name], array, remedy)


def _require_own(batch: DenseBatch, columns: SampleColumns) -> None:
    """Raise Broken where a dense row is a view of the samples, which other micro-batches and epochs read too."""
    sources = {"input_ids": columns.input_ids, "loss_weight": columns.loss_weight, **columns.columns}
    for name, field in batch.fields.items():
        shared = [source for source, array in sources.items() if np.may_share_memory(field.numpy(), array)]
        require(
            not shared or name in batch.ragged_offsets,
            f"{name} is the memory of the samples' own {', '.join(shared)}",
            "Return memory of its own from every build: a backend may write into it",
        )


@promise("It changes neither the samples nor the plan that it is given", cases=cuts(*EVERY), first=list_explicit_cuts, effort=0.2)
def inputs_unchanged(subject: Subject[Any], case: CutCase) -> None:
    columns, lengths, collator = case.columns, case.planning.lengths, subject.make()
    columns_before, lengths_before = _bytes_of(columns), _bytes_of(lengths)
    plan = list(plan_with(collator, subject.label, Planning(lengths, case.layout)).micro_batches)
    rows = [_bytes_of(micro_batch) for micro_batch in plan]
    for micro_batch in plan:
        build_with(collator, subject.label, columns, micro_batch)
    compared = [("samples'", columns_before, _bytes_of(columns)), ("lengths'", lengths_before, _bytes_of(lengths))]
    compared += [("plan's", one, _bytes_of(micro_batch)) for one, micro_batch in zip(rows, plan, strict=True)]
    for whose, one, other in compared:
        for name, content in one.items():
            require(
                other[name] == content, f"changes the {whose} {name} in place, which later micro-batches read too", "Work on a copy"
            )


def _bytes_of(value: Any) -> dict[str, bytes]:
    """Return all arrays of samples, lengths or rows as bytes, by name."""
    contents = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
    columns = contents.pop("columns", {})
    return {name: array.tobytes() for name, array in {**contents, **columns}.items() if isinstance(array, np.ndarray)}


def copy_arrays(batch: DenseBatch) -> dict[str, AnyArray]:
    """Return copies of all arrays that were built, by name."""
    arrays = {f"gather.{name}": getattr(batch.gather, name) for name in ("actions", "rows", "columns")}
    arrays |= {f"ragged_offsets of {name}": offsets for name, offsets in batch.ragged_offsets.items()}
    ragged_by_name = {"sequence_lengths": batch.sequence_lengths, "cu_seqlens": batch.cu_seqlens}
    if batch.tree is not None:
        ragged_by_name |= {name: getattr(batch.tree, name) for name in ("lengths", "parents", "last_segments")}
    for name, ragged in ragged_by_name.items():
        if ragged is not None:
            arrays |= {name: ragged.values, f"{name}.offsets": ragged.offsets}
    return {name: array.copy() for name, array in ({name: field.numpy() for name, field in batch.fields.items()} | arrays).items()}


BUILD_PROMISES: tuple[Promise[Any, Any], ...] = (
    tokens,
    predecessors,
    bounds,
    trees,
    numbers,
    reference,
    rows_alone,
    fields,
    own_memory,
    build_order,
    inputs_unchanged,
)
