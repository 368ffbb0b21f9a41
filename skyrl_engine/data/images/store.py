"""The images of a tokenized dataset: columns name them, and a batch reads its own, so that no image is held in between."""

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.config.schema import KnownFormat
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.extras import IMAGE_GRID, PIXEL_VALUES, TOKEN_TYPES
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, RaggedView, offsets_of
from skyrl_engine.data.images.files import StoredImage, parse_image
from skyrl_engine.data.images.processor import MeasuredImage, VisionInputs
from skyrl_engine.data.images.tokens import in_threads
from skyrl_engine.data.sources.formats import to_examples
from skyrl_engine.data.sources.rows import Source
from skyrl_engine.data.table.token_table import TableImages
from skyrl_engine.data.text.messages import Conversation

IMAGES = "images"
"""The extra that names images: int64 [images of the sample, 5], an image's number, its file's CRC-32, and its grid."""

_IMAGE_TYPE = 1
"""Image tokens have this type in `mm_token_type_ids`."""


@frozen(eq=False)
class ImageStore:
    """Reads the images that columns name in their extra `images`: from files, or again from the rows of `source` that hold them.

    `written` is object [images]: each image's path as its row has it, empty where the row holds the image itself.
    """

    source: Source
    format: KnownFormat
    written: AnyArray
    vision: VisionInputs
    rating: str | None = None
    """The number by which rated answers become a pair, `data.rating`."""

    def load_images(self, columns: SampleColumns) -> SampleColumns:
        """Return `columns` with `pixel_values`, `image_grid_thw` and `mm_token_type_ids` in place of the names.

        Every sample has all three; one without an image has no patches. Raises ImageError, naming the sample, for an image
        that cannot be read any more or has changed.
        """
        names = columns.extras[IMAGES]
        facts = np.concatenate([names[sample] for sample in range(len(names))])
        grids, counts = facts[:, 2:], names.lengths
        patches = offsets_of(grids.prod(axis=1))
        pixels = np.empty((int(patches[-1]), self.vision.patch_dim), dtype=np.float32)
        images = self._read_images(columns, facts[:, 0])

        def read(place: int) -> None:
            expected = MeasuredImage("", int(facts[place, 1]), (int(grids[place, 0]), int(grids[place, 1]), int(grids[place, 2])))
            pixels[patches[place] : patches[place + 1]] = self.vision.patches(images[place], expected)

        in_threads(read, range(len(images)))
        owned = offsets_of(counts)
        types = (columns.input_ids == self.vision.image_token).astype(np.int32) * np.int32(_IMAGE_TYPE)
        extras = {
            PIXEL_VALUES: Ragged(pixels, patches[owned]),
            IMAGE_GRID: Ragged(np.ascontiguousarray(grids), owned),
            TOKEN_TYPES: Ragged(types, columns.token_offsets),
        }
        others = {name: view for name, view in columns.extras.items() if name != IMAGES}
        return evolve(columns, extras={**others, **{name: RaggedView.of(ragged) for name, ragged in extras.items()}})

    def spans(self, columns: SampleColumns, sample: int) -> list[tuple[int, int, int]]:
        """Return for each image of a sample its number of tokens, and the width and height in pixels that the model sees."""
        size = int(self.vision.processor.patch_size)
        grids = [(int(time), int(height), int(width)) for *_, time, height, width in columns.extras[IMAGES][sample]]
        return [(self.vision.tokens(grid), grid[2] * size, grid[1] * size) for grid in grids]

    def _read_images(self, columns: SampleColumns, numbers: IntArray) -> list[StoredImage]:
        """Return the images by number; a row that holds images is read again, once."""
        rows, counts = columns.sample_values["row"].tolist(), columns.extras[IMAGES].lengths
        places = [(row, place) for row, count in zip(rows, counts.tolist(), strict=True) for place in range(count)]
        inside: dict[int, tuple[StoredImage, ...]] = {}
        for (row, _), number in sorted(zip(places, numbers.tolist(), strict=True)):
            if not self.written[number] and row not in inside:
                inside[row] = self._of_row(row)
        stored = []
        for (row, place), number in zip(places, numbers.tolist(), strict=True):
            written = self.written[number]
            stored.append(self._of_file(row, place, written) if written else inside[row][place])
        return stored

    def _of_row(self, number: int) -> tuple[StoredImage, ...]:
        # both halves of a preference have the images of their prompt
        (example, _), *_ = to_examples(self.source.row(number), self.format, has_template=True, rating=self.rating)
        assert isinstance(example, Conversation), "only conversations have images"
        return example.images

    def _of_file(self, row: int, place: int, written: str) -> StoredImage:
        name = f"sample {row} of {self.source.name}, image {place + 1}"
        return parse_image(written, name, self.source.folders([row])[0])


def files_of(images: TableImages, rows: IntArray, source: Source) -> set[str]:
    """Return the files that hold the images of a table; `rows` int64[N] are its samples' rows in the source."""
    folders = source.folders(np.repeat(rows, np.diff(images.offsets)))
    stored = (parse_image(written, "", folder) for written, folder in zip(images.written, folders, strict=True) if written)
    return {str(image.path) for image in stored}


def image_names(images: TableImages) -> Ragged:
    """Return the extra `images` of a whole table."""
    numbers = np.arange(len(images.facts), dtype=np.int64)[:, None]
    return Ragged(np.concatenate([numbers, images.facts], axis=1), images.offsets)
