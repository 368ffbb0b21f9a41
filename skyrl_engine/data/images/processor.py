"""The image processor of a vision-language model: it cuts images into a grid of patches, whose size decides their number of tokens.

Tokenizer and image processor are loaded apart, the processor in its form over Pillow and NumPy: the same numbers whether torchvision is
installed or not.
"""

import json
import math
import zlib
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from skyrl_engine.config.schema import DataConfig, ModelConfig
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.data.images.files import StoredImage, decode_image, first_line
from skyrl_engine.errors import ImageError, UnsupportedError
from skyrl_engine.model_facts.configuration import location_of
from skyrl_engine.model_facts.facts import ModelFacts

Grid = tuple[int, int, int]
"""Patches along time, height and width."""


@frozen
class MeasuredImage:
    """An image that was measured: its path as the row has it (empty: the row holds it), CRC-32 of its file, and grid of patches."""

    written: str
    checksum: int
    grid: Grid


@frozen
class NoVision:
    """The reason why this model cannot train on images, reported with the first sample that has one."""

    cause: str = "no model takes them"
    remedy: str = "Remove the images, or use a vision-language model"

    def refusal(self, name: str) -> UnsupportedError:
        """Return the error for sample `name`."""
        return UnsupportedError(f"{name} has images, and {self.cause}", remedy=self.remedy)


@frozen(eq=False)
class VisionInputs:
    """Turns images into model inputs. `image_token` is the token id that stands for an image's features in the text.

    `processor` is a transformers image processor that cuts images into patches of a grid (those of the Qwen-VL models).
    """

    processor: Any
    image_token: int
    max_pixels: int
    _grids: dict[tuple[int, int], Grid] = field(factory=dict, init=False, repr=False)

    @property
    def patch_dim(self) -> int:
        """Return the size of a patch in numbers: three colours, two frames in time."""
        return 3 * int(self.processor.temporal_patch_size) * int(self.processor.patch_size) ** 2

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens that an image with this grid has in the text."""
        return math.prod(grid) // int(self.processor.merge_size) ** 2

    def identity(self) -> str:
        """Return everything that decides an image's number of tokens, for the cache key; Pillow decides which files are images."""
        settings = [
            *(type(self.processor).__name__, self.processor.to_dict(), self.image_token, self.max_pixels),
            metadata.version("pillow"),
        ]
        return json.dumps(settings, sort_keys=True, default=str)

    def measure(self, image: StoredImage) -> MeasuredImage:
        """Unpack the image once, to check that it can be read and to count its patches. Raises ImageError."""
        encoded = image.read_bytes()
        picture = decode_image(image, encoded, self.max_pixels)
        if picture.size not in self._grids:  # a grid depends on nothing but the size
            self._grids[picture.size] = self._process(image, picture)[1]
        return MeasuredImage(image.written, zlib.crc32(encoded), self._grids[picture.size])

    def patches(self, image: StoredImage, expected: MeasuredImage) -> npt.NDArray[np.float32]:
        """Return float32 [patches, patch_dim] of the image. Raises ImageError, also for an image other than the `expected` one."""
        encoded = image.read_bytes()
        if zlib.crc32(encoded) != expected.checksum:
            raise ImageError(
                f"{image.name} has changed since the data was tokenized",
                remedy="Start the run again; leave images alone while it goes on",
            )
        values, grid = self._process(image, decode_image(image, encoded, self.max_pixels))
        assert grid == expected.grid, f"an image of grid {expected.grid} became {grid}"
        assert values.shape == (math.prod(grid), self.patch_dim), f"patches of {values.shape} for the grid {grid}"
        return values

    def _process(self, image: StoredImage, picture: Any) -> tuple[npt.NDArray[np.float32], Grid]:
        try:
            tensors = self.processor(images=[picture], return_tensors="np")
        except ValueError as error:  # a strip so narrow that no grid fits it
            raise ImageError(
                f"{image.name}, {picture.width} x {picture.height} pixels: the image processor refuses it: {first_line(error)}",
                remedy='Replace the image, or set data.bad_images = "drop"',
            ) from error
        grid: IntArray = tensors["image_grid_thw"]
        return tensors["pixel_values"], (int(grid[0, 0]), int(grid[0, 1]), int(grid[0, 2]))


Vision = VisionInputs | NoVision


def load_vision(facts: ModelFacts, data: DataConfig) -> Vision:
    """Load the image inputs of a vision-language model, or say why there are none.

    A model that is trained on text alone needs neither an image processor nor Pillow, so nothing is raised here.
    """
    model, config = facts.model, facts.config
    image_token = getattr(config, "image_token_id", None)
    if image_token is None or getattr(config, "vision_config", None) is None:
        return NoVision(f"the model {model.path} takes none: its configuration has no vision_config with an image_token_id")
    if find_spec("PIL") is None:
        return NoVision("Pillow, which reads them, is not installed", 'Run pip install "skyrl-engine[vision]"')
    processor = _load_processor(model)
    if isinstance(processor, NoVision):
        return processor
    if not all(hasattr(processor, name) for name in ("patch_size", "merge_size", "temporal_patch_size")):
        return NoVision(
            f"the image processor {type(processor).__name__} of {model.path} does not cut them into patches of a grid",
            "Use a dense Qwen3-VL model",
        )
    if data.shrink_images_to is not None:
        limit = min(data.shrink_images_to, processor.size["longest_edge"])
        smallest = min(limit, processor.size["shortest_edge"])
        processor.size = type(processor.size)(shortest_edge=smallest, longest_edge=limit)
    return VisionInputs(processor, int(image_token), data.max_image_pixels)


def _load_processor(model: ModelConfig) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(**location_of(model), backend="pil")
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        # transformers below 5.18 reads no image without torchvision, not even by Pillow
        is_old = isinstance(error, ImportError) and find_spec("torchvision") is None
        return NoVision(
            f"no image processor can be loaded from {model.path}: {first_line(error)}",
            'Run pip install "transformers>=5.18", or install torchvision'
            if is_old
            else "Check that it holds preprocessor_config.json",
        )
