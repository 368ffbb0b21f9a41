"""Expert routes and images of rows; `extras_loops.py` next to it is the definition, equal bit for bit.

Both engines share this NumPy code: routes are long runs of bytes, and writing them costs 0.8 to 1.6 times what a plain copy of the output
costs (25 to 100 MB, 48 layers of 8 experts in uint8, int16 and int32), so a compiled kernel would have little left to win.
"""

from collections.abc import Container, Mapping

import numpy as np
from attrs import frozen

from skyrl_engine import DataError
from skyrl_engine.contracts import (
    EXPERT_ROUTES,
    IMAGE_GRID,
    PIXEL_VALUES,
    ROUTER_PADDING_MASK,
    TOKEN_TYPES,
    AnyArray,
    Carried,
    IntArray,
    RaggedView,
    SampleColumns,
    offsets_of,
)
from skyrl_engine_collators.segments import write_segments

CARRIES: frozenset[Carried] = frozenset(("router_replay", "vision"))
FIELDS_OF = {
    EXPERT_ROUTES: (EXPERT_ROUTES, ROUTER_PADDING_MASK),
    PIXEL_VALUES: (PIXEL_VALUES,),
    IMAGE_GRID: (IMAGE_GRID,),
    TOKEN_TYPES: (TOKEN_TYPES,),
}
"""The fields that each extra gives, in order."""


@frozen(eq=False)
class Placement:
    """The places of n samples in `shape` (rows, columns): `places` int64[n], ascending, is row * columns + column of each one's first token.

    `samples` int64[n] are their numbers in the columns.
    """

    samples: IntArray
    places: IntArray
    shape: tuple[int, int]


def extra_names(columns: SampleColumns) -> tuple[str, ...]:
    """Return the names of all fields that these columns' extras give."""
    return tuple(field for extra, fields in FIELDS_OF.items() if extra in columns.extras for field in fields)


def build_extras(
    columns: SampleColumns, placement: Placement, wanted: Container[str]
) -> tuple[dict[str, AnyArray], dict[str, IntArray]]:
    """Return the fields that are `wanted` and exist, and the samples' offsets int64[n+1] in those that are ragged.

    `expert_routes` [rows, columns, layers, topk] and `router_padding_mask` bool [rows, columns]; `pixel_values`, `image_grid_thw` over the
    samples in order; `mm_token_type_ids` int64 [rows, columns]. Raises DataError for an extra that is longer than its sample.
    """
    chosen = {
        name: columns.extras[name].take(placement.samples)
        for name, fields in FIELDS_OF.items()
        if name in columns.extras and any(field in wanted for field in fields)
    }
    fields: dict[str, AnyArray] = {}
    offsets: dict[str, IntArray] = {}
    if EXPERT_ROUTES in chosen:
        _check_lengths(columns, placement, EXPERT_ROUTES, chosen[EXPERT_ROUTES])
        fields |= _routes(chosen[EXPERT_ROUTES], placement, wanted)
    for name in (PIXEL_VALUES, IMAGE_GRID):
        if name in chosen:
            fields[name], offsets[name] = _concatenate(chosen[name])
    if TOKEN_TYPES in chosen:
        _check_lengths(columns, placement, TOKEN_TYPES, chosen[TOKEN_TYPES])
        fields[TOKEN_TYPES] = np.empty(placement.shape, dtype=np.int64)
        _write(fields[TOKEN_TYPES].reshape(-1), 0, chosen[TOKEN_TYPES], placement.places)
    return fields, offsets


def _routes(routes: RaggedView, placement: Placement, wanted: Container[str]) -> Mapping[str, AnyArray]:
    """Write captured routes at the front of each sample, and experts 0, 1, ... elsewhere, so that no token has an expert twice."""
    fields: dict[str, AnyArray] = {}
    cells = placement.shape[0] * placement.shape[1]
    if EXPERT_ROUTES in wanted:
        layers, choices = routes.values.shape[1:]
        fields[EXPERT_ROUTES] = np.empty((*placement.shape, layers, choices), dtype=routes.values.dtype)
        # One axis after the first: NumPy then copies a token's routes, or a whole run of them, at once.
        tokens = RaggedView(routes.values.reshape(len(routes.values), layers * choices), routes.starts, routes.lengths)
        padding = np.tile(np.arange(choices, dtype=np.int64), layers)
        _write(fields[EXPERT_ROUTES].reshape(cells, layers * choices), padding, tokens, placement.places)
    if ROUTER_PADDING_MASK in wanted:
        fields[ROUTER_PADDING_MASK] = mask = np.empty(placement.shape, dtype=np.bool_)
        captured = np.broadcast_to(np.False_, (int(routes.lengths.max(initial=0)),))
        _write(mask.reshape(-1), True, RaggedView(captured, np.zeros_like(routes.lengths), routes.lengths), placement.places)
    return fields


def _concatenate(view: RaggedView) -> tuple[AnyArray, IntArray]:
    offsets = offsets_of(view.lengths)
    array = np.empty((int(offsets[-1]), *view.values.shape[1:]), dtype=view.values.dtype)
    _write(array, 0, view, offsets[:-1])
    return array, offsets


def _write(out: AnyArray, fill: AnyArray | int, view: RaggedView, places: IntArray) -> None:
    write_segments(out, fill, view.values, starts=view.starts, lengths=view.lengths, places=places)


def _check_lengths(columns: SampleColumns, placement: Placement, name: str, view: RaggedView) -> None:
    """Raises DataError for an extra longer than its sample, which would be written into the next; `SampleColumns.create` refuses it too."""
    tokens = np.diff(columns.token_offsets)[placement.samples]
    if (view.lengths > tokens).any():
        place = int(np.argmax(view.lengths > tokens))
        raise DataError(
            f"sample {int(columns.sample_ids[placement.samples[place]])} has {int(view.lengths[place])} rows of {name} for "
            f"{int(tokens[place])} tokens",
            remedy="Make the columns with SampleColumns.create",
        )
