"""Promises about the extras of samples in dense rows: expert routes and images."""

from typing import Any

import numpy as np

from skyrl_engine.contracts.kinds.collator import ROUTER_PADDING_MASK, DenseBatch
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.extras import EXPERT_ROUTES, IMAGE_GRID, PIXEL_VALUES, TOKEN_TYPES
from skyrl_engine.contracts.values.plan import MicroBatchPlan
from skyrl_engine.testing.collators.cases import CutCase, builds, cuts, require, require_same_field, token_places
from skyrl_engine.testing.promise import Promise, promise
from skyrl_engine.testing.subject import Subject


def _require_presence(batch: DenseBatch, columns: SampleColumns, field: str, extra: str) -> None:
    is_built = field in batch.fields
    require(
        is_built == (extra in columns.extras),
        f"{field} is {'there without' if is_built else 'left out with'} {extra} in the samples",
        "Declare in carries what is laid over rows, and make its fields where samples have it",
    )


@promise(
    "Captured expert routes lie at the first tokens of their sample, and masked experts 0, 1, ... everywhere else",
    cases=cuts("router_replay"),
)
def expert_routes(subject: Subject[Any], case: CutCase) -> None:
    for micro_batch, batch in builds(subject, case):
        for field in (EXPERT_ROUTES, ROUTER_PADDING_MASK):
            _require_presence(batch, case.columns, field, EXPERT_ROUTES)
        if EXPERT_ROUTES in case.columns.extras:
            _require_routes(case.columns, micro_batch, batch)


def _require_routes(columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch) -> None:
    captured, routes = columns.extras[EXPERT_ROUTES], batch[EXPERT_ROUTES].numpy()
    shape = (micro_batch.rows, micro_batch.width)
    form, expected = (routes.dtype, routes.shape), (captured.values.dtype, (*shape, *captured.values.shape[1:]))
    require(
        form == expected, f"expert_routes is {form[0]} {form[1]}, not {expected[0]} {expected[1]}", "Keep the dtype of the columns"
    )
    padding = np.ones(shape, dtype=np.bool_)
    for sample, row, places in token_places(batch, columns, micro_batch):
        own_routes = captured[sample]
        padding[row, places[: len(own_routes)]] = False
        require(
            np.array_equal(routes[row, places[: len(own_routes)]], own_routes),
            f"sample {sample} has lost the routes of its first {len(own_routes)} tokens",
            "Write captured routes from the first token of the sample on",
        )
    remedy = "Make it False at captured routes alone"
    require_same_field(ROUTER_PADDING_MASK, batch[ROUTER_PADDING_MASK].numpy(), padding, remedy)
    require(
        (routes[padding] == np.arange(routes.shape[-1])).all(),
        "expert_routes do not hold experts 0, 1, ... where none was captured",
        "Fill with arange(topk): a router that sees one expert twice fails",
    )


@promise(
    "Patches and grids follow one another as the samples do, `ragged_offsets` say whose they are, token types lie at their tokens",
    cases=cuts("vision"),
)
def images(subject: Subject[Any], case: CutCase) -> None:
    for micro_batch, batch in builds(subject, case):
        for field in (PIXEL_VALUES, IMAGE_GRID, TOKEN_TYPES):
            _require_presence(batch, case.columns, field, field)
        _require_images(case.columns, micro_batch, batch)


def _require_images(columns: SampleColumns, micro_batch: MicroBatchPlan, batch: DenseBatch) -> None:
    remedy = "Append what the samples have in the plan's order, and give int64 ragged_offsets of samples + 1 entries"
    for name in (PIXEL_VALUES, IMAGE_GRID):
        require((name in batch.ragged_offsets) == (name in batch.fields), f"ragged_offsets and fields disagree on {name}", remedy)
        if name not in columns.extras:
            continue
        view, array, offsets = columns.extras[name], batch[name].numpy(), batch.ragged_offsets[name]
        require(array.dtype == view.values.dtype, f"{name} is {array.dtype}, not {view.values.dtype}", remedy)
        spans = offsets.dtype == np.int64 and offsets.shape == (len(micro_batch.samples) + 1,)
        require(
            spans and (offsets[0], offsets[-1]) == (0, len(array)),
            f"ragged_offsets of {name} are {offsets.dtype} {offsets.tolist()} for {len(micro_batch.samples)} samples",
            remedy,
        )
        for place, sample in enumerate(micro_batch.samples.tolist()):
            got, expected = array[offsets[place] : offsets[place + 1]], np.ascontiguousarray(view[sample])
            require(got.tobytes() == expected.tobytes(), f"{name} of sample {sample} are another's", remedy)
    if TOKEN_TYPES in columns.extras:
        expected = np.zeros((micro_batch.rows, micro_batch.width), dtype=np.int64)
        for sample, row, places in token_places(batch, columns, micro_batch):
            own_types = columns.extras[TOKEN_TYPES][sample]
            expected[row, places[: len(own_types)]] = own_types
        require_same_field(
            TOKEN_TYPES, batch[TOKEN_TYPES].numpy(), expected, "Write token types where the sample's tokens lie, 0 elsewhere"
        )


EXTRAS_PROMISES: tuple[Promise[Any, Any], ...] = (expert_routes, images)
