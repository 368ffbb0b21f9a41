"""The definition of expert routes and images in rows, one token at a time, for any layout that says where its samples begin."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts import AnyArray, SampleColumns


@frozen
class PlacedExtras:
    """The extras of one sample by name, each array [length, ...], with the sample's row and the column of its first token."""

    row: int
    column: int
    arrays: Mapping[str, AnyArray]


def extras_of(columns: SampleColumns, sample: int) -> dict[str, AnyArray]:
    """Return the extras of one sample of these columns."""
    return {name: view[sample] for name, view in columns.extras.items()}


def forms_of(columns: SampleColumns) -> dict[str, AnyArray]:
    """Return an array without entries for each extra, in its dtype and with the shape of an entry."""
    return {name: view.values[:0] for name, view in columns.extras.items()}


def build_extras(forms: Mapping[str, AnyArray], samples: Sequence[PlacedExtras], rows: int, width: int) -> dict[str, AnyArray]:
    """Every field of the extras that `forms` has, over R rows of W columns, for samples in the order of the rows.

    `expert_routes` [R,W,layers,topk] in the dtype of `forms`, arange(topk) where nothing was captured; `router_padding_mask` bool [R,W],
    True there; `pixel_values` float32 [patches,dim] and `image_grid_thw` int64 [images,3], sample by sample; `mm_token_type_ids`
    int64 [R,W], 0 on padding.
    """
    fields: dict[str, AnyArray] = {}
    if "expert_routes" in forms:
        fields["expert_routes"], fields["router_padding_mask"] = _routes(forms["expert_routes"], samples, rows, width)
    for name in ("pixel_values", "image_grid_thw"):
        if name in forms:
            entries = [entry for sample in samples for entry in sample.arrays[name]]
            fields[name] = np.zeros((len(entries), *forms[name].shape[1:]), dtype=forms[name].dtype)
            for place, entry in enumerate(entries):
                fields[name][place] = entry
    if "mm_token_type_ids" in forms:
        types: npt.NDArray[np.int64] = np.zeros((rows, width), dtype=np.int64)
        for sample in samples:
            for position, kind in enumerate(sample.arrays["mm_token_type_ids"]):
                types[sample.row, sample.column + position] = kind
        fields["mm_token_type_ids"] = types
    return fields


def _routes(form: AnyArray, samples: Sequence[PlacedExtras], rows: int, width: int) -> tuple[AnyArray, npt.NDArray[np.bool_]]:
    _, layers, choices = form.shape
    routes = np.zeros((rows, width, layers, choices), dtype=form.dtype)
    mask = np.ones((rows, width), dtype=np.bool_)
    for row in range(rows):
        for column in range(width):
            routes[row, column] = np.arange(choices)  # in every layer
    for sample in samples:
        for position, captured in enumerate(sample.arrays["expert_routes"]):
            mask[sample.row, sample.column + position] = False
            routes[sample.row, sample.column + position] = captured
    return routes, mask
