"""Give images their tokens while a dataset is tokenized: each is read once, and a bad one stops the run or drops its sample."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from attrs import define, evolve, field

from skyrl_engine.data.images.files import StoredImage
from skyrl_engine.data.images.processor import MeasuredImage, NoVision, Vision, VisionInputs
from skyrl_engine.data.sources.formats import Example
from skyrl_engine.data.text.messages import Conversation
from skyrl_engine.data.text.tokenization import TokenizedSample
from skyrl_engine.errors import ImageError

Item = TypeVar("Item")
Made = TypeVar("Made")

_log = logging.getLogger(__name__)


@define(eq=False)
class ImageInspection:
    """Reads the images of samples and gives the samples their image tokens. `dropped` counts samples left out for an image.

    `seen` maps the files that were read to their state before that: a file that changes meanwhile is noticed by the next run.
    """

    vision: Vision
    policy: Literal["error", "drop"]
    dropped: int = field(default=0, init=False)
    seen: dict[str, str] = field(factory=dict, init=False)

    def attempt(self, make: Callable[[], Made]) -> Made | None:
        """Return `make()`, or None, which is counted, where its image is bad and such samples are dropped; else raises ImageError."""
        try:
            return make()
        except ImageError as error:
            if self.policy == "error":
                raise
            self.dropped += 1
            if self.dropped == 1:
                _log.warning("Samples with bad images are left out, the first of them: %s", error.cause)
            return None

    def look(self, examples: Sequence[Example]) -> list[Callable[[TokenizedSample], TokenizedSample]]:
        """Read the images of all `examples`, in threads; return for each a function that puts them into its sample, or raises ImageError."""
        images = [example.images if isinstance(example, Conversation) else () for example in examples]
        flat = [image for own in images for image in own]
        for path in {str(image.path) for image in flat if image.path is not None} - self.seen.keys():
            self.seen[path] = state_of_file(path)
        measured = iter(in_threads(self._measure, flat) if isinstance(self.vision, VisionInputs) else ())
        return [self._make_laying_function(own, measured) for own in images]

    def _make_laying_function(self, images: Sequence[StoredImage], measured: Any) -> Callable[[TokenizedSample], TokenizedSample]:
        vision = self.vision
        if isinstance(vision, NoVision):
            return lambda sample: _refuse(sample, vision) if images else sample
        of_sample = [next(measured) for _ in images]
        return lambda sample: with_images(sample, of_sample, vision)

    def _measure(self, image: StoredImage) -> MeasuredImage | ImageError:
        assert isinstance(self.vision, VisionInputs), "images are looked at for a model"
        try:
            return self.vision.measure(image)
        except ImageError as error:
            return error


def with_images(sample: TokenizedSample, images: Sequence[MeasuredImage | ImageError], vision: VisionInputs) -> TokenizedSample:
    """Return the sample with each image's single token repeated as often as its grid needs; none of these tokens carries loss.

    Raises the first image's ImageError, or one for a text that has not exactly one such token per image.
    """
    measured = []
    for image in images:
        if isinstance(image, ImageError):
            raise image
        measured.append(image)
    places = np.flatnonzero(sample.input_ids == vision.image_token)
    if len(places) != len(measured):
        raise ImageError(
            f"{sample.name} has {len(places)} places for images in its text, and {len(measured)} images",
            remedy='Let the messages have one part of type image for every image and no image tokens as text, or set data.bad_images = "drop"',
        )
    if not measured:
        return sample
    repeats = np.ones(len(sample.input_ids), dtype=np.int64)
    repeats[places] = tokens = [vision.tokens(image.grid) for image in measured]
    ids = np.repeat(sample.input_ids, repeats)
    loss = np.repeat(sample.loss, repeats) & (ids != vision.image_token)
    weights = None if sample.weights is None else np.where(loss, np.repeat(sample.weights, repeats), np.float32(0))
    return evolve(sample, input_ids=ids, loss=loss, weights=weights, images=tuple(measured), image_tokens=sum(tokens))


def _refuse(sample: TokenizedSample, vision: NoVision) -> TokenizedSample:
    raise vision.refusal(sample.name)


def in_threads(work: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
    """Return `work` of every item, in order, done in threads: Pillow and NumPy let other threads work."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(len(items), os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


def state_of_file(path: str) -> str:
    """Return a file's size and modification time as text, which show a change; "absent" for a file that is not there."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return "absent"
    return f"{status.st_size} {status.st_mtime_ns}"


def digest_of_states(states: Mapping[str, str]) -> str:
    """Return sha256 over the paths and states of files, in any order."""
    digest = hashlib.sha256()
    for path, state in sorted(states.items()):
        digest.update(f"{path}\0{state}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()
