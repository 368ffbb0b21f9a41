"""Samples and layouts for tests of collators, the plans and builds of them, and comparisons of fields."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.collator import Collator, DenseBatch, as_dense_batch, declared_extras
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MicroBatchPlan, SampleLengths, as_batch_plan
from skyrl_engine.contracts.values.prefixes import PrefixTree, find_common_prefixes
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, offsets_of
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.testing.collators import strategies
from skyrl_engine.testing.promise import Broken, Inapplicable
from skyrl_engine.testing.subject import Subject


@frozen(eq=False)
class Planning:
    """Lengths of samples, and a layout that they fit into."""

    lengths: SampleLengths
    layout: Layout

    def __str__(self) -> str:
        tokens, actions = (", ".join(map(str, numbers.tolist())) for numbers in (self.lengths.tokens, self.lengths.actions))
        prefixes = self.lengths.prefixes
        shared = "" if prefixes is None else f"\nin the order {prefixes.order.tolist()}, sharing {prefixes.shared.tolist()}"
        return f"samples of {tokens} tokens, of which the last {actions} are actions{shared}\n{self.layout}"


@frozen(eq=False)
class CutCase:
    """Samples, and a layout that they fit into. With `trees` the planner is told of every prefix that they share, however short."""

    columns: SampleColumns
    layout: Layout
    trees: bool = False

    @property
    def planning(self) -> Planning:
        lengths, columns = self.columns.lengths, self.columns
        if self.trees:
            lengths = evolve(lengths, prefixes=find_common_prefixes(columns.input_ids, columns.token_offsets, least=1))
        return Planning(lengths, self.layout)

    def __str__(self) -> str:
        carried = f"\nwith {', '.join(sorted(self.columns.extras))}" if self.columns.extras else ""
        return f"{self.planning}{carried}"


def plannings(subject: Subject[Any]) -> st.SearchStrategy[Planning]:
    """Draw lengths with layouts, from the subject's own `layouts` where it has them."""

    @st.composite
    def draw_case(draw: st.DrawFn) -> Planning:
        lengths = draw(strategies.sample_lengths())
        if subject.make().rows == "tree":
            lengths = evolve(lengths, prefixes=draw(strategies.common_prefixes(lengths)))
        return Planning(lengths, draw(_layouts(subject)(lengths)))

    return draw_case()


def _layouts(subject: Subject[Any]) -> Callable[[SampleLengths], st.SearchStrategy[Layout]]:
    return subject.hooks.get("layouts", strategies.layouts)


def cuts(*extras: str) -> Callable[[Subject[Any]], st.SearchStrategy[CutCase]]:
    """Draw cuts, from the subject's own `layouts` where it has them; samples carry those of the named extras that the collator declares."""

    def cases(subject: Subject[Any]) -> st.SearchStrategy[CutCase]:
        collator = subject.make()
        carries, trees = sorted(declared_extras(collator) & {*extras}), collator.rows == "tree"

        @st.composite
        def draw_case(draw: st.DrawFn) -> CutCase:
            columns = draw(strategies.sample_columns(carries=carries))
            if trees:
                columns = draw(strategies.with_prefixes(columns))
            return CutCase(columns, draw(_layouts(subject)(columns.lengths)), trees)

        return draw_case()

    return cases


def plan_case(subject: Subject[Any], case: Planning) -> BatchPlan:
    """Return the subject's plan of the case. Raises Broken where it fails, unless it refuses the layout as such."""
    return plan_with(subject.make(), subject.label, case)


def plan_with(collator: Collator, label: str, case: Planning) -> BatchPlan:
    """Do as `plan_case`, with a collator that exists already."""
    try:
        with blame(Owner.of_unrecorded(label, "collator"), "plan"):
            returned = collator.plan(case.lengths, case.layout)
        return as_batch_plan(label, returned)
    except UnsupportedError as refused:
        raise Inapplicable(refused.cause) from refused
    except EngineError as failed:
        raise Broken(failed.cause, failed.remedy) from failed


def build_rows(subject: Subject[Any], columns: SampleColumns, rows: MicroBatchPlan, **options: Any) -> DenseBatch:
    """Return the subject's build of these rows. Raises Broken where it fails."""
    return build_with(subject.make(), subject.label, columns, rows, **options)


def build_with(collator: Collator, label: str, columns: SampleColumns, rows: MicroBatchPlan, **options: Any) -> DenseBatch:
    """Do as `build_rows`, with a collator that exists already."""
    try:
        with blame(Owner.of_unrecorded(label, "collator"), "build"):
            returned = collator.build(columns, rows, **options)
        batch = as_dense_batch(label, returned, whole="input_ids" in (options.get("fields") or ("input_ids",)))
    except EngineError as failed:
        raise Broken(failed.cause, failed.remedy) from failed
    for name, field in batch.fields.items():
        try:
            field.numpy()
        except Exception as error:
            cause = " ".join(str(error).split())
            raise Broken(
                f"{name} cannot be read: {cause}", "Give CPU tensors of int64, float32 or bool, without a gradient"
            ) from error
    return batch


def builds(subject: Subject[Any], case: CutCase) -> Iterator[tuple[MicroBatchPlan, DenseBatch]]:
    """Return every micro-batch of the subject's plan with its build, all of them made by one collator before the first is looked at."""
    collator = subject.make()
    plan = list(plan_case(subject, case.planning).micro_batches)
    yield from zip(plan, [build_with(collator, subject.label, case.columns, rows) for rows in plan], strict=True)


def row_samples(micro_batch: MicroBatchPlan) -> list[tuple[int, ...]]:
    """Return the samples of each row."""
    samples = micro_batch.samples.tolist()
    return [tuple(samples[start:stop]) for start, stop in pairwise(micro_batch.row_offsets.tolist())]


def token_places(batch: DenseBatch, columns: SampleColumns, micro_batch: MicroBatchPlan) -> Iterator[tuple[int, int, IntArray]]:
    """Yield every sample, its row, and the columns of its tokens, read from the segments of a tree or from the attention mask."""
    if batch.tree is not None:
        yield from _places_in_trees(batch.tree, micro_batch)
        return
    lengths = np.diff(columns.token_offsets)
    mask = batch["attention_mask"].numpy()
    for row, samples in enumerate(row_samples(micro_batch)):
        real, begin = np.flatnonzero(mask[row]), 0
        for sample in samples:
            yield sample, row, real[begin : begin + int(lengths[sample])]
            begin += int(lengths[sample])


def _places_in_trees(tree: PrefixTree, micro_batch: MicroBatchPlan) -> Iterator[tuple[int, int, IntArray]]:
    for row, samples in enumerate(row_samples(micro_batch)):
        bounds = offsets_of(tree.lengths[row])
        last_segments = tree.last_segments[row].tolist()
        require(
            len(last_segments) == len(samples), f"last_segments of row {row} are {last_segments}", "Give one per sample of the row"
        )
        for sample, last in zip(samples, last_segments, strict=True):
            pieces, segment = [], last
            while segment >= 0:
                pieces.append(np.arange(bounds[segment], bounds[segment + 1], dtype=np.int64))
                segment = int(tree.parents[row][segment])
            yield sample, row, np.concatenate(pieces[::-1])


def require(condition: Any, cause: str, remedy: str) -> None:
    """Raise Broken unless the condition holds."""
    if not condition:
        raise Broken(cause, remedy)


def require_same_field(name: str, got: AnyArray, due: AnyArray, remedy: str = "Compare the two") -> None:
    """Raise Broken unless both are equal bit for bit: dtype, shape, C-contiguity and every byte, so that NaN and -0.0 count."""
    require(got.dtype == due.dtype, f"{name} is {got.dtype}, not {due.dtype}", remedy)
    require(got.shape == due.shape, f"{name} has shape {got.shape}, not {due.shape}", remedy)
    require(got.flags.c_contiguous, f"{name} is not C-contiguous", "Return np.ascontiguousarray(field)")
    require(got.tobytes() == np.ascontiguousarray(due).tobytes(), f"{name} is\n{got}\nnot\n{due}", remedy)


def require_same_fields(batch: DenseBatch, due: Mapping[str, AnyArray], remedy: str = "Compare the two") -> None:
    """Raise Broken unless the batch has these fields and no others, each the same bit for bit."""
    require(batch.fields.keys() == due.keys(), f"fields are {sorted(batch.fields)} where {sorted(due)} are due", remedy)
    for name, array in due.items():
        require(batch[name].is_contiguous(), f"{name} is not contiguous", "Return np.ascontiguousarray(field)")
        require_same_field(name, batch[name].numpy(), array, remedy)
