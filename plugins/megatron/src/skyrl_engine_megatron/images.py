"""The images that one rank needs: those that its own tokens belong to, and the feature of each such token."""

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.modeling.images import PlacedImages, choose_images

NOWHERE = -1
"""The number that stands for no feature, at a token that belongs to no image."""


@frozen(eq=False)
class Images:
    """Images for the vision tower, `pixel_values` [patches, d] and `grid` int64[images, 3], and the tokens that get their features.

    The token at `places[k]` of this rank gets feature `features[k]`; both int64[m]. A rank leaves out images of which it has no token, so its
    gradient of the tower is a part of the whole.
    """

    pixel_values: Tensor
    grid: Tensor
    features: Tensor
    places: Tensor

    @classmethod
    def of(cls, pixel_values: Tensor, grid: Tensor, placed: PlacedImages, feature_of_S: Tensor) -> "Images | None":
        """Return those of the micro-batch's images that this rank's tokens need, or None if they need none.

        `feature_of_S` int64 is, for each of this rank's tokens, the feature, numbered over all images, that takes its place, or `NOWHERE`.
        """
        places = (feature_of_S != NOWHERE).nonzero()[:, 0]
        if not len(places):
            return None
        pixel_values, grid, features = choose_images(
            pixel_values, grid, torch.from_numpy(placed.bounds).diff(), feature_of_S[places]
        )
        return cls(pixel_values, grid, features, places)

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> "Images":
        """Return a copy whose tensors went through `move`, such as to another device."""
        return Images(move(self.pixel_values), move(self.grid), move(self.features), move(self.places))
