"""The images of a micro-batch's row as one rank needs them: those that its own tokens lie in, and which feature belongs to which token."""

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.modeling.images import PlacedImages

NOWHERE = -1
"""The feature of a token that is none of an image's."""


@frozen(eq=False)
class Images:
    """`pixel_values` [patches, d] and `grid` int64[images, 3] for the tower; the token at `places[k]` of this rank gets feature `features[k]`.

    Both int64[m]. Which rank has no token of an image leaves that image out, and each rank's gradient of the tower is then a part of it.
    """

    pixel_values: Tensor
    grid: Tensor
    features: Tensor
    places: Tensor

    @classmethod
    def of(cls, pixel_values: Tensor, grid: Tensor, placed: PlacedImages, feature_of_S: Tensor) -> "Images | None":
        """Of the whole micro-batch's images those that this rank's tokens need; None where they need none.

        `feature_of_S` int64: for each of this rank's tokens the feature, numbered over all images, that takes its place, or `NOWHERE`.
        """
        places = (feature_of_S != NOWHERE).nonzero()[:, 0]
        if not len(places):
            return None
        features = feature_of_S[places]
        sizes = torch.from_numpy(placed.bounds).diff()
        image_of_feature = torch.arange(len(grid)).repeat_interleave(sizes)
        needed = torch.zeros(len(grid), dtype=torch.bool).index_fill(0, image_of_feature[features], True)
        number = needed.repeat_interleave(sizes).cumsum(0) - 1  # of each feature among those of the needed images
        return cls(pixel_values[needed.repeat_interleave(grid.prod(1))], grid[needed], number[features], places)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Images":
        """The same on another device."""
        return Images(move(self.pixel_values), move(self.grid), move(self.features), move(self.places))
