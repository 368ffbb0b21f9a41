"""A file of an object store that is read as a `Path` is, in blocks, each of which is asked for again when the store fails."""

import io
from functools import cached_property
from typing import IO, Any, Final

from attrs import frozen

from skyrl_engine.errors import StoreError
from skyrl_engine.object_store.place import StorePlace

BLOCK: Final = 8 * 2**20
"""Bytes that are asked for at once."""


@frozen(eq=False)
class _Facts:
    st_size: int


@frozen(eq=False)
class RemoteFile:
    """A file of a store: the reading half of a `Path`."""

    place: StorePlace

    def __str__(self) -> str:
        return str(self.place)

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self.place.name

    @property
    def suffix(self) -> str:
        """The ending of its name, with its dot."""
        return f".{self.name.rpartition('.')[2]}" if "." in self.name.lstrip(".") else ""

    @cached_property
    def _bytes(self) -> int:
        return self.place.size()

    def stat(self) -> _Facts:
        """Return its size, `st_size`, asked for once. Raises FileNotFoundError and StoreError."""
        return _Facts(self._bytes)

    def open(self, mode: str = "r", *, encoding: str | None = None, newline: str | None = None) -> IO[Any]:
        """Open it for reading, as bytes (`rb`) or text (`r`). Raises FileNotFoundError and StoreError, then and while it is read."""
        assert mode in ("r", "rb"), mode
        file = io.BufferedReader(_Blocks(self.place, self._bytes), BLOCK)
        return file if mode == "rb" else io.TextIOWrapper(file, encoding=encoding, newline=newline)

    def read_text(self, encoding: str) -> str:
        """Return the whole text. Raises as `open`."""
        with self.open(encoding=encoding) as file:
            return str(file.read())


class _Blocks(io.RawIOBase):
    """The bytes of a file that has `size` of them: each read is one call for a range, tried again as `StorePlace.call` does."""

    def __init__(self, place: StorePlace, size: int) -> None:
        self._place, self._size, self._at = place, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        start, end = self._at, min(self._at + len(buffer), self._size)
        if start >= end:
            return 0

        def ask() -> bytes:
            content = bytes(self._place.files.cat_file(self._place.path, start=start, end=end))
            if len(content) != end - start:
                raise OSError(f"it gave {len(content)} bytes where {end - start} were asked for")
            return content

        try:
            content = self._place.call(ask)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self._place} was deleted while it was read", remedy="Put it back, and resume the run or start it again"
            ) from error
        buffer[: len(content)] = content
        self._at = end
        return len(content)
