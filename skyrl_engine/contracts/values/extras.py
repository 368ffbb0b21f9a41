"""Extras of samples, other than tokens and numbers: routes of a mixture of experts, and images. Ragged per sample, checked once.

Kept flat, and seen through views, so that neither choosing samples nor cutting them into shards copies megabytes.

| name | values of one sample | meaning |
|---|---|---|
| `expert_routes` | uint8, int16 or int32 [captured, layers, topk] | what the sampler's router chose for the first tokens |
| `pixel_values` | float32 [patches, dim] | patches of all its images |
| `image_grid_thw` | int64 [images, 3] | patches of each image along time, height and width |
| `mm_token_type_ids` | int32 [tokens] or [0] | 0 for text, 1 for image, 2 for video tokens, as in `transformers` |

Other names are open: collators that know them use them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, RaggedView, offsets_of
from skyrl_engine.errors import DataError

EXPERT_ROUTES = "expert_routes"
PIXEL_VALUES = "pixel_values"
IMAGE_GRID = "image_grid_thw"
TOKEN_TYPES = "mm_token_type_ids"  # noqa: S105 the field's name, not a secret
OF_IMAGES = (PIXEL_VALUES, IMAGE_GRID, TOKEN_TYPES)
"""A vision-language model is given these."""

ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.int32))


def check_extras(extras: Mapping[str, Any], lengths: IntArray) -> dict[str, RaggedView]:
    """Every extra as a view: flat values that fit are not copied, one list, NumPy array or torch tensor per sample becomes flat.

    `lengths` int64[N] are the samples' tokens. None, and an extra that no sample has, are left out. Raises DataError naming the sample.
    """
    views = {name: _READERS.get(name, _as_it_is(name))(value, lengths) for name, value in extras.items() if value is not None}
    present = {name: view for name, view in views.items() if view is not None}
    _check_images(present)
    return present


@frozen
class _Form:
    """The form of one sample's values; `words` name them in messages, `axes` counts theirs, `optional` says that a sample may have none."""

    words: str
    kinds: str
    axes: int
    optional: bool

    def read(self, value: Any, count: int) -> list[AnyArray | None]:
        """One array per sample, all of one width; None where a sample has none."""
        if len(value) != count:
            raise DataError(f"{self.words} are given for {len(value)} samples of {count}", remedy="Give every sample its own entry")
        arrays = [self._one(sample, value[sample]) for sample in range(count)]
        widths = [(sample, array.shape[1:]) for sample, array in enumerate(arrays) if array is not None]
        for sample, width in widths:
            if width != widths[0][1]:
                raise DataError(
                    f"sample {sample} has {self.words} of {list(width)} per row, sample {widths[0][0]} of {list(widths[0][1])}",
                    remedy=f"Make the {self.words} of one batch with one model",
                )
        return arrays

    def _one(self, sample: int, row: Any) -> AnyArray | None:
        try:
            if self.optional and (row is None or len(row) == 0):
                return None
            if hasattr(row, "detach"):  # a torch tensor, on any device; torch is not imported for the others
                row = row.detach().cpu()
                row = (row.float() if row.is_floating_point() else row).numpy()
            if row is None:
                raise TypeError("they are missing")
            array = np.asarray(row)
        except (TypeError, ValueError) as problem:
            raise DataError(
                f"sample {sample} has {self.words} that cannot be read: {problem}",
                remedy="Give one nested list, NumPy array or tensor per sample",
            ) from problem
        if array.ndim != self.axes:
            raise DataError(
                f"sample {sample} has {self.words} of shape {list(array.shape)}, which is not {self.axes} axes",
                remedy="Give each sample's array by itself, without a batch axis",
            )
        if array.dtype.kind not in self.kinds:
            kind = "whole numbers" if "i" in self.kinds else "floats"
            raise DataError(f"sample {sample} has {self.words} of {array.dtype}, not {kind}", remedy=f"Store them as {kind}")
        return array


_ROUTES = _Form("expert routes", kinds="iu", axes=3, optional=False)
_PIXELS = _Form("pixel values", kinds="f", axes=2, optional=True)
_GRID = _Form("image grids", kinds="iu", axes=2, optional=True)
_TYPES = _Form("token types", kinds="iu", axes=1, optional=True)


def _routes(value: Any, lengths: IntArray) -> RaggedView | None:
    """In the narrowest dtype that holds all of them: a batch of samples takes the widest that one of its samples needs."""
    arrays = _ROUTES.read(value, len(lengths))
    widest = ROUTE_DTYPES[0]
    for sample, array in enumerate(arrays):
        assert array is not None, "routes are not optional"
        rows, _layers, choices = array.shape
        if not 1 <= rows <= lengths[sample]:
            raise DataError(
                f"sample {sample} has expert routes for {rows} of {int(lengths[sample])} tokens",
                remedy="Give the routes of at least one and at most all of a sample's tokens, beginning with its first",
            )
        if choices < 1:
            raise DataError(f"sample {sample} has expert routes without an expert", remedy="Give at least one expert per layer")
        widest = max(widest, _narrowest(sample, array), key=lambda dtype: dtype.itemsize)
    return _flat(value, arrays, widest)


def _narrowest(sample: int, array: AnyArray) -> np.dtype[Any]:
    low, high = (0, 0) if array.dtype == np.uint8 else (int(array.min(initial=0)), int(array.max(initial=0)))
    high = max(high, array.shape[-1] - 1)  # the value on padding
    if low < 0:
        raise DataError(f"sample {sample} has the negative expert {low} in its routes", remedy="Number experts from 0")
    for dtype in ROUTE_DTYPES:
        if high <= np.iinfo(dtype).max:
            return dtype
    raise DataError(f"sample {sample} has the expert {high} in its routes, more than int32 holds", remedy="Number experts from 0")


def _pixels(value: Any, lengths: IntArray) -> RaggedView | None:
    return _flat(value, _PIXELS.read(value, len(lengths)), np.dtype(np.float32))


def _grid(value: Any, lengths: IntArray) -> RaggedView | None:
    arrays = _GRID.read(value, len(lengths))
    for sample, array in enumerate(arrays):
        if array is not None and (array.shape[1] != 3 or array.min() < 1):
            raise DataError(
                f"sample {sample} has an image grid that is not three positive numbers",
                remedy="Give time, height and width in patches of each image, as the image processor does",
            )
    return _flat(value, arrays, np.dtype(np.int64))


def _types(value: Any, lengths: IntArray) -> RaggedView | None:
    arrays = _TYPES.read(value, len(lengths))
    for sample, (array, tokens) in enumerate(zip(arrays, lengths.tolist(), strict=True)):
        if array is None:
            continue
        if len(array) != tokens:
            raise DataError(f"sample {sample} has {len(array)} token types for {tokens} tokens", remedy="Give one type per token")
        if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
            raise DataError(f"sample {sample} has a token type that is negative or beyond int32", remedy="Number types from 0")
    return _flat(value, arrays, np.dtype(np.int32))


def _flat(value: Any, arrays: list[AnyArray | None], dtype: np.dtype[Any]) -> RaggedView | None:
    """All arrays as one of `dtype`, None among them without values; `value` itself where it is that already.

    None where no sample has any, unless `value` is flat and so tells how wide its rows would be.
    """
    view = RaggedView.of(value) if isinstance(value, Ragged) else value
    if isinstance(view, RaggedView):
        if view.values.dtype == dtype and view.values.flags.c_contiguous:
            return view
        width: tuple[int, ...] | None = view.values.shape[1:]
    else:
        width = next((array.shape[1:] for array in arrays if array is not None), None)
    if width is None:
        return None
    lengths = np.array([0 if array is None else len(array) for array in arrays], dtype=np.int64)
    offsets = offsets_of(lengths)
    values = np.empty((int(offsets[-1]), *width), dtype=dtype)
    for array, start, length in zip(arrays, offsets[:-1].tolist(), lengths.tolist(), strict=True):
        if array is not None:
            values[start : start + length] = array
    return RaggedView(values, offsets[:-1], lengths)


def _as_it_is(name: str) -> Callable[[Any, IntArray], RaggedView]:
    def read(value: Any, lengths: IntArray) -> RaggedView:
        if not isinstance(value, Ragged | RaggedView):
            raise DataError(
                f"{name!r} is {type(value).__name__}, which is not ragged", remedy="Pass a Ragged, flat values and offsets"
            )
        if len(value) != len(lengths):
            raise DataError(f"{name!r} has {len(value)} entries for {len(lengths)} samples", remedy="Give one entry per sample")
        return RaggedView.of(value) if isinstance(value, Ragged) else value

    return read


def _check_images(extras: Mapping[str, RaggedView]) -> None:
    """Pixels and grids come together, and each grid counts its image's patches."""
    pixels, grid = extras.get(PIXEL_VALUES), extras.get(IMAGE_GRID)
    if pixels is None and (grid is None or not grid.lengths.any()):
        return
    if pixels is None or grid is None:
        present, missing = (IMAGE_GRID, PIXEL_VALUES) if pixels is None else (PIXEL_VALUES, IMAGE_GRID)
        raise DataError(f"samples have {present} without {missing}", remedy="Pass everything that the image processor made")
    for sample in range(len(pixels)):
        counted = int(grid[sample].prod(axis=1).sum())
        if counted != pixels.lengths[sample]:
            raise DataError(
                f"sample {sample} has {int(pixels.lengths[sample])} patches where its {int(grid.lengths[sample])} image grids "
                f"count {counted}",
                remedy="Pass pixel_values and image_grid_thw of the same images",
            )


_READERS: dict[str, Callable[[Any, IntArray], RaggedView | None]] = {
    EXPERT_ROUTES: _routes,
    PIXEL_VALUES: _pixels,
    IMAGE_GRID: _grid,
    TOKEN_TYPES: _types,
}
