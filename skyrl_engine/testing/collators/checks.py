"""What must hold of every collator's plans and builds, as plain assertions; `collator.CollatorConformance` runs them over random input."""

from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

import numpy as np

from skyrl_engine.contracts.kinds.collator import ROUTER_PADDING_MASK, Carried, Collator, DenseBatch, carried_by
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.extras import EXPERT_ROUTES, IMAGE_GRID, PIXEL_VALUES, TOKEN_TYPES
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MicroBatchPlan, SampleLengths
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray

MODEL_FIELDS = ("input_ids", "attention_mask", "position_ids")
FIELDS_OF_EXTRAS = {
    EXPERT_ROUTES: EXPERT_ROUTES,
    ROUTER_PADDING_MASK: EXPERT_ROUTES,
    PIXEL_VALUES: PIXEL_VALUES,
    IMAGE_GRID: IMAGE_GRID,
    TOKEN_TYPES: TOKEN_TYPES,
}
"""Fields of what samples carry beside tokens and numbers, each with the extra that it is made of."""


def micro_batches(plan: BatchPlan) -> list[MicroBatchPlan]:
    """All of a plan's micro-batches: mini-batch by mini-batch, rank by rank."""
    return [micro_batch for mini_batch in plan.mini_batches for rank in mini_batch.ranks for micro_batch in rank]


def row_samples(micro_batch: MicroBatchPlan) -> list[tuple[int, ...]]:
    """The samples of each row."""
    samples = micro_batch.samples.tolist()
    return [tuple(samples[start:stop]) for start, stop in pairwise(micro_batch.row_offsets.tolist())]


def check_declared_rows(declared: str, plan: BatchPlan) -> None:
    """A collator that declares padded rows never puts two samples into one."""
    assert declared in ("padded", "packed"), f"rows is {declared!r}"
    assert declared == "packed" or all(len(samples) <= 1 for samples in rows(plan)), (
        "a row of a padded collator holds several samples"
    )


def check_declared_carries(collator: Collator) -> None:
    """`carries`, where a collator has it, names capabilities."""
    assert carried_by(collator) <= frozenset(get_args(Carried)), f"carries is {sorted(carried_by(collator))}"


def rows(plan: BatchPlan) -> list[tuple[int, ...]]:
    """The samples of each row of a plan, in the order of `micro_batches`."""
    return [samples for micro_batch in micro_batches(plan) for samples in row_samples(micro_batch)]


def check_plan(plan: BatchPlan, lengths: SampleLengths, layout: Layout) -> None:
    """Samples once each, nothing cut that belongs together, ranks in step, sizes kept, rows well formed."""
    cut = micro_batches(plan)
    planned = np.concatenate([np.zeros(0, dtype=np.int64), *(micro_batch.samples for micro_batch in cut)])
    assert sorted(planned.tolist()) == list(range(len(lengths))), "every sample must be planned exactly once"
    assert np.array_equal(plan.sample_ids, lengths.sample_ids), "sample_ids must be those of the batch, in the caller's order"
    _check_whole([mini_batch.samples for mini_batch in plan.mini_batches], lengths.group_ids, "a group is cut over mini-batches")
    _check_whole([micro_batch.samples for micro_batch in cut], lengths.unit_ids, "a unit is cut over micro-batches")
    for mini_batch in plan.mini_batches:
        assert len(mini_batch.ranks) == layout.dp, "a mini-batch must have one part per data-parallel rank"
        counts = {len(rank) for rank in mini_batch.ranks}
        assert len(counts) == 1, f"ranks have different numbers of micro-batches: {sorted(counts)}"
        assert layout.mini_batch_size is None or len(mini_batch.samples) <= layout.mini_batch_size, "a mini-batch is too large"
    for micro_batch in cut:
        _check_rows(micro_batch, lengths, layout)
    if layout.width == "batch":
        assert len({(micro_batch.width, micro_batch.action_width) for micro_batch in cut}) <= 1, "widths must be the whole batch's"


def _check_whole(parts: list[IntArray], labels: IntArray, complaint: str) -> None:
    seen: set[int] = set()
    for part in parts:
        inside = set(labels[part].tolist())
        assert not inside & seen, f"{complaint}: {sorted(inside & seen)}"
        seen |= inside


def _check_rows(micro_batch: MicroBatchPlan, lengths: SampleLengths, layout: Layout) -> None:
    offsets = micro_batch.row_offsets
    for array in (micro_batch.samples, offsets):
        assert array.dtype == np.int64, "samples and row_offsets must be int64"
    assert offsets[0] == 0, "row_offsets must start at 0"
    assert offsets[-1] == len(micro_batch.samples), "row_offsets must end at the number of samples"
    assert (np.diff(offsets) >= 0).all(), "row_offsets must rise"
    assert micro_batch.rows >= 1, "a micro-batch needs a row, if an empty one"
    assert micro_batch.width >= 1, "a row needs a column"
    for start, stop in pairwise(offsets.tolist()):
        assert lengths.tokens[micro_batch.samples[start:stop]].sum() <= micro_batch.width, "a row's samples are longer than the row"
    if layout.micro_batch_rows is not None:
        assert micro_batch.rows <= layout.micro_batch_rows, "a micro-batch has more rows than allowed"
    if layout.micro_batch_tokens is not None:
        assert micro_batch.rows * micro_batch.width <= layout.micro_batch_tokens, "a micro-batch is over the budget of tokens"


def check_same_plan(plan: BatchPlan, again: BatchPlan) -> None:
    """Both plans put every sample into the same place."""
    first, second = micro_batches(plan), micro_batches(again)
    assert [[len(rank) for rank in mini.ranks] for mini in plan.mini_batches] == [
        [len(rank) for rank in mini.ranks] for mini in again.mini_batches
    ], "planning the same lengths twice gave other numbers of micro-batches"
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one.samples, other.samples), "planning the same lengths twice gave other samples"
        assert np.array_equal(one.row_offsets, other.row_offsets), "planning the same lengths twice gave other rows"
        assert (one.width, one.action_width) == (other.width, other.action_width), (
            "planning the same lengths twice gave other widths"
        )


def check_gather(batch: DenseBatch, columns: SampleColumns, micro_batch: MicroBatchPlan) -> None:
    """The gather index names the predecessor of every action token that has one, in its sample's row, and real tokens only."""
    ids, mask = batch["input_ids"].numpy(), batch["attention_mask"].numpy()
    row_of = np.repeat(np.arange(micro_batch.rows), np.diff(micro_batch.row_offsets))
    expected = []
    action = 0
    for sample, row in zip(micro_batch.samples.tolist(), row_of.tolist(), strict=True):
        tokens = columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]].tolist()
        actions = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
        for position in range(len(tokens) - actions, len(tokens)):
            if position > 0:
                expected.append((action, row, tokens[position - 1], tokens[position]))
            action += 1
    gather = batch.gather
    for array in (gather.actions, gather.rows, gather.columns):
        assert array.dtype == np.int64, "the gather index must be int64"
        assert array.shape == (len(expected),), f"the gather index has {array.shape} entries for {len(expected)} tokens to score"
    assert (gather.columns >= 0).all(), "the gather index points before column 0"
    places = zip(gather.actions.tolist(), gather.rows.tolist(), gather.columns.tolist(), strict=True)
    seen: set[tuple[int, int]] = set()
    for (place, row, column), (action, own_row, predecessor, token) in zip(places, expected, strict=True):
        assert (place, row) == (action, own_row), (
            f"entry for action {place} in row {row} where action {action} in row {own_row} is due"
        )
        assert mask[row, column] == 1, f"action {action} is scored from padding"
        assert mask[row, column + 1] == 1, f"action {action} stands on padding"
        assert ids[row, column] == predecessor, f"action {action} is not scored from its predecessor"
        assert ids[row, column + 1] == token, f"the token after the place that scores action {action} is another one"
        assert (row, column) not in seen, f"two actions are scored from row {row}, column {column}"
        seen.add((row, column))


def check_model_inputs(batch: DenseBatch, columns: SampleColumns, micro_batch: MicroBatchPlan) -> None:
    """Every row holds its samples' tokens in order and nothing else, positions count from 0 in each sample, true lengths are told."""
    shape = (micro_batch.rows, micro_batch.width)
    for name in MODEL_FIELDS:
        array = batch[name].numpy()
        assert array.dtype == np.int64, f"{name} must be int64"
        assert array.shape == shape, f"{name} has shape {array.shape} where the plan says {shape}"
    assert len(batch.sequence_lengths) == micro_batch.rows, "sequence_lengths must have one entry per row"
    ids, mask, positions = (batch[name].numpy() for name in MODEL_FIELDS)
    assert np.isin(mask, (0, 1)).all(), "attention_mask must hold 0 and 1"
    for row, (start, stop) in enumerate(pairwise(micro_batch.row_offsets.tolist())):
        samples = micro_batch.samples[start:stop].tolist()
        tokens = [columns.input_ids[columns.token_offsets[i] : columns.token_offsets[i + 1]] for i in samples]
        nothing = np.zeros(0, dtype=np.int64)
        real = mask[row] == 1
        assert np.array_equal(ids[row][real], np.concatenate([nothing, *tokens])), f"row {row} does not hold its samples' tokens"
        counted = np.concatenate([nothing, *(np.arange(len(part)) for part in tokens)])
        assert np.array_equal(positions[row][real], counted), f"positions in row {row} do not count from 0 in every sample"
        told = batch.sequence_lengths[row]
        assert told.dtype == np.int64, "sequence_lengths must be int64"
        assert told.tolist() == [len(part) for part in tokens], f"sequence_lengths of row {row} are not its samples' lengths"


def check_cu_seqlens(batch: DenseBatch, columns: SampleColumns, micro_batch: MicroBatchPlan) -> None:
    """Where rows hold several samples, `cu_seqlens` bounds each of them: its tokens fill the front of its own piece of the row."""
    if batch.cu_seqlens is None:
        assert (np.diff(micro_batch.row_offsets) <= 1).all(), "rows of several samples need cu_seqlens"
        return
    assert len(batch.cu_seqlens) == micro_batch.rows, "cu_seqlens must have one entry per row"
    lengths = np.diff(columns.token_offsets)
    mask = batch["attention_mask"].numpy()
    for row, (samples, bounds) in enumerate(zip(row_samples(micro_batch), batch.cu_seqlens, strict=True)):
        assert bounds.dtype == np.int32, "cu_seqlens must be int32"
        assert bounds.shape == (len(samples) + 1,), f"cu_seqlens of row {row} must bound its {len(samples)} samples"
        assert bounds[0] == 0, f"cu_seqlens of row {row} must begin at column 0"
        assert bounds[-1] <= micro_batch.width, f"cu_seqlens of row {row} reach beyond the row"
        real = np.zeros(micro_batch.width, dtype=np.int64)
        for sample, (begin, end) in zip(samples, pairwise(bounds.tolist()), strict=True):
            assert begin + lengths[sample] <= end, f"cu_seqlens of row {row} cut sample {sample}"
            assert (end - begin) % micro_batch.alignment == 0, f"sample {sample} in row {row} is not aligned"
            real[begin : begin + lengths[sample]] = 1
        assert np.array_equal(mask[row], real), f"cu_seqlens of row {row} do not say where its samples begin"


def check_expert_routes(batch: DenseBatch, columns: SampleColumns, micro_batch: MicroBatchPlan) -> None:
    """Captured routes stand at the first tokens of their sample and nowhere else; other places hold experts 0, 1, ... and are masked."""
    if EXPERT_ROUTES not in columns.extras:
        return
    captured = columns.extras[EXPERT_ROUTES]
    routes, mask = batch[EXPERT_ROUTES].numpy(), batch[ROUTER_PADDING_MASK].numpy()
    shape = (micro_batch.rows, micro_batch.width)
    assert routes.dtype == captured.values.dtype, f"expert_routes is {routes.dtype}, the samples' are {captured.values.dtype}"
    assert routes.shape == (*shape, *captured.values.shape[1:]), f"expert_routes has shape {routes.shape}"
    assert mask.dtype == np.bool_, f"router_padding_mask is {mask.dtype}"
    assert mask.shape == shape, f"router_padding_mask has shape {mask.shape}"
    padding = np.ones(shape, dtype=np.bool_)
    for sample, row, places in token_places(batch, columns, micro_batch):
        mine = captured[sample]
        padding[row, places[: len(mine)]] = False
        assert np.array_equal(routes[row, places[: len(mine)]], mine), (
            f"sample {sample} lost the routes of its first {len(mine)} tokens"
        )
    assert np.array_equal(mask, padding), "router_padding_mask is not False at captured routes alone"
    assert (routes[padding] == np.arange(routes.shape[-1])).all(), (
        "expert_routes do not hold experts 0, 1, ... where none was captured"
    )


def check_images(batch: DenseBatch, columns: SampleColumns, micro_batch: MicroBatchPlan) -> None:
    """Patches and grids follow one another as the samples do, `ragged_offsets` says whose they are, and token types stand at their tokens."""
    for name in (PIXEL_VALUES, IMAGE_GRID):
        assert (name in batch.ragged_offsets) == (name in batch.fields), f"ragged_offsets and fields disagree on {name}"
        if name not in columns.extras:
            continue
        view, array, offsets = columns.extras[name], batch[name].numpy(), batch.ragged_offsets[name]
        assert array.dtype == view.values.dtype, f"{name} is {array.dtype}, not {view.values.dtype}"
        assert offsets.dtype == np.int64, f"ragged_offsets of {name} must be int64"
        assert offsets.shape == (len(micro_batch.samples) + 1,), f"ragged_offsets of {name} must bound every sample"
        assert (offsets[0], offsets[-1]) == (0, len(array)), f"ragged_offsets of {name} must span it"
        for place, sample in enumerate(micro_batch.samples.tolist()):
            found = array[offsets[place] : offsets[place + 1]]
            assert found.tobytes() == np.ascontiguousarray(view[sample]).tobytes(), f"{name} of sample {sample} are another's"
    if TOKEN_TYPES in columns.extras:
        types = batch[TOKEN_TYPES].numpy()
        expected = np.zeros((micro_batch.rows, micro_batch.width), dtype=np.int64)
        for sample, row, places in token_places(batch, columns, micro_batch):
            mine = columns.extras[TOKEN_TYPES][sample]
            expected[row, places[: len(mine)]] = mine
        check_same_field(TOKEN_TYPES, types, expected)


def token_places(batch: DenseBatch, columns: SampleColumns, micro_batch: MicroBatchPlan) -> Iterator[tuple[int, int, IntArray]]:
    """Every sample, its row, and the columns of its tokens, by the attention mask."""
    lengths = np.diff(columns.token_offsets)
    mask = batch["attention_mask"].numpy()
    for row, samples in enumerate(row_samples(micro_batch)):
        real, begin = np.flatnonzero(mask[row]), 0
        for sample in samples:
            yield sample, row, real[begin : begin + int(lengths[sample])]
            begin += int(lengths[sample])


def check_same_field(name: str, got: AnyArray, expected: AnyArray) -> None:
    """Equal bit for bit: dtype, shape, C-contiguity and every byte, so that NaN and -0.0 count."""
    assert got.dtype == expected.dtype, f"{name} is {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{name} has shape {got.shape}, not {expected.shape}"
    assert got.flags.c_contiguous, f"{name} is not C-contiguous"
    assert got.tobytes() == np.ascontiguousarray(expected).tobytes(), f"{name} differs in value:\n{got}\nnot\n{expected}"
