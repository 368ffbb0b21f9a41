"""Images as rows hold them: the path of a file, or the bytes of one. Nothing is fetched over a network."""

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

from attrs import field, frozen

from skyrl_engine.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

_OR_DROP = 'or set data.bad_images = "drop"'
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError, struct.error, zlib.error)
"""Pillow raises these for files that are not what they claim to be."""


@frozen
class StoredImage:
    """One image of a row, not yet read: a file, `path`, or the bytes of one, `content`.

    `name` names sample and image in errors; `written` is the path as the row has it, empty where the row holds the bytes.
    """

    name: str
    written: str = ""
    path: Path | None = None
    content: bytes | None = field(default=None, repr=False)

    def read_bytes(self) -> bytes:
        """Return the bytes of the image file. Raises ImageError."""
        if self.content is not None:
            return self.content
        assert self.path is not None, "an image is a file or bytes"
        try:
            return self.path.read_bytes()
        except FileNotFoundError as error:
            raise ImageError(
                f"{self.name}: there is no file {self.path}",
                remedy=f"Correct the path, which starts from the folder of the data, {_OR_DROP}",
            ) from error
        except (OSError, ValueError) as error:
            raise ImageError(
                f"{self.name}: {str(self.path)[:200]} cannot be read ({getattr(error, 'strerror', None) or error})",
                remedy=f"Make the file readable, or write base64 as data:image/png;base64,..., {_OR_DROP}",
            ) from error


def parse_image(image: object, name: str, folder: Path | None) -> StoredImage:
    """Return the image that a row gives as a path (relative to `folder`), a file: or data: address, bytes, or an object with one of them.

    An object's bytes come before its path, which in saved datasets is only a name. Raises ImageError for anything else.
    """
    if isinstance(image, Mapping):
        image = next((image[key] for key in ("bytes", "path", "url") if image.get(key) is not None), image)
    if isinstance(image, bytes):
        return StoredImage(name, content=image)
    if not isinstance(image, str) or not image:
        raise ImageError(
            f"{name} is {_describe(image)}", remedy=f"Give a path, an image file's bytes or a data: address, {_OR_DROP}"
        )
    scheme = image[:8].partition(":")[0].lower()
    if scheme == "data":
        return StoredImage(name, content=_of_data_address(image, name))
    if scheme in ("http", "https"):
        raise ImageError(
            f"{name} is the address {image[:80]}, and nothing is fetched over the network",
            remedy=f"Download the images and give their paths, {_OR_DROP}",
        )
    try:
        place = url2pathname(urlsplit(image).path) if scheme == "file" else image
        path = Path(folder or "", Path(place).expanduser())
    except (ValueError, RuntimeError) as error:  # an address that cannot be taken apart, a user who is not there
        raise ImageError(f"{name} is {image[:80]!r}, which is no path: {error}", remedy=f"Correct the path, {_OR_DROP}") from error
    return StoredImage(name, written=image, path=path)


def _describe(image: object) -> str:
    if isinstance(image, Mapping):
        return f"an object with {', '.join(map(repr, image)) or 'nothing'}, without bytes or a path"
    return "empty" if image is None or image == "" else f"a {type(image).__name__}"


def _of_data_address(address: str, name: str) -> bytes:
    head, comma, payload = address.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it is not in base64")
        return base64.b64decode(payload, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ImageError(
            f"{name} is a data: address that cannot be read: {error}", remedy=f"Write it as data:image/png;base64,..., {_OR_DROP}"
        ) from error


def decode_image(image: StoredImage, encoded: bytes, max_pixels: int) -> "Image":
    """Decode the image in RGB, upright by its orientation tag, as `transformers.image_utils.load_image` does.

    Its size is checked before it is unpacked. Raises ImageError for an image that is damaged or has more than `max_pixels` pixels.
    """
    from PIL import Image
    from transformers.image_utils import load_image

    try:
        opened = Image.open(BytesIO(encoded))
        if opened.width * opened.height > max_pixels:
            raise ImageError(
                f"{image.name} has {opened.width} x {opened.height} pixels, more than data.max_image_pixels = {max_pixels}",
                remedy=f"Scale the image down, raise data.max_image_pixels, {_OR_DROP}",
            )
        return cast("Image.Image", load_image(opened))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(
            f"{image.name} has more pixels than Pillow takes ({Image.MAX_IMAGE_PIXELS} without a warning)",
            remedy=f"Scale the image down, {_OR_DROP}",
        ) from error
    except ImageError:
        raise
    except _BROKEN as error:
        what = f"{image.path}" if image.path is not None else "it"
        raise ImageError(
            f"{image.name}: {what} is no image that can be read ({first_line(error)})", remedy=f"Replace the image, {_OR_DROP}"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, without its final stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
