"""Read an index, and a wheel beside it: from a folder, or by https."""

import http.client
import ipaddress
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from attrs import frozen

from skyrl_engine import __version__
from skyrl_engine.errors import PluginIndexError

LARGEST_INDEX: Final = 2**24
"""Bytes of an index."""
_SECONDS: Final = 60.0
"""Seconds without an answer."""
_CHUNK: Final = 2**20


@frozen
class IndexPlace:
    """The place of an index: a file, or an address by https, or by http on this machine."""

    text: str
    file: Path | None

    @classmethod
    def of(cls, text: str) -> "IndexPlace":
        """Read what a caller named. Raises PluginIndexError for other addresses than https, file, and http to this machine."""
        if "://" not in text:
            return cls(text, Path(text).expanduser())
        parts = _split(text)
        if parts.scheme == "file":
            if parts.netloc not in ("", "localhost"):
                raise PluginIndexError(f"{text} names another machine", remedy="Write file:///PATH, or the path alone")
            return cls(text, Path(unquote(parts.path)))
        _require_safe(text)
        return cls(text, None)

    def read_index(self) -> bytes:
        """Return the content of the index. Raises PluginIndexError where it cannot be had, or is larger than an index is."""
        with self._open(self.text, self.file) as source:
            content = source.read(LARGEST_INDEX + 1)
        if len(content) > LARGEST_INDEX:
            raise PluginIndexError(f"{self.text} has more than {LARGEST_INDEX} bytes, and is no index", remedy=_OTHER_INDEX)
        return content

    def copy_wheel(self, name: str, size: int, target: Path) -> None:
        """Copy the wheel that lies beside the index into `target`. Raises PluginIndexError where it cannot be had or has another size."""
        if self.file is None:
            place, file = urljoin(self.text, quote(name)), None
        else:
            file = self.file.parent / name
            place = str(file)
        copied = 0
        with self._open(place, file) as source, target.open("wb") as copy:
            while copied <= size and (chunk := source.read(min(_CHUNK, size + 1 - copied))):
                copy.write(chunk)
                copied += len(chunk)
        if copied != size:
            found = f"more than {size}" if copied > size else str(copied)
            raise PluginIndexError(f"{place} has {found} bytes, and {size} were verified", remedy=_NOT_VERIFIED)

    @contextmanager
    def _open(self, place: str, file: Path | None) -> Iterator[IO[bytes]]:
        try:
            if file is not None:
                # a pipe would be waited for
                descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
                with os.fdopen(descriptor, "rb") as source:
                    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                        raise PluginIndexError(f"{place} is no file", remedy=_OTHER_INDEX)
                    yield source
            else:
                with _open_address(place) as answer:
                    yield answer
        except HTTPError as error:
            raise PluginIndexError(f"{place} answers with {error.code} {error.reason}", remedy=_OTHER_INDEX) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else getattr(error, "strerror", None) or error
            raise PluginIndexError(f"{place} cannot be read: {cause}", remedy=_OTHER_INDEX) from error


_OTHER_INDEX: Final = "Name an index that can be read with --index FILE|URL"
_NOT_VERIFIED: Final = "It is not the file that was verified: ask whoever made the index, and install nothing from it until then"


def _open_address(place: str) -> Any:
    # what is on this machine is not asked for by a proxy
    proxies = (ProxyHandler({}),) if urlsplit(place).scheme == "http" else ()
    opener = build_opener(_SafeRedirects(), *proxies)
    return opener.open(Request(place, headers={"User-Agent": f"skyrl-engine/{__version__}"}), timeout=_SECONDS)  # noqa: S310 - the scheme was checked


class _SafeRedirects(HTTPRedirectHandler):
    """Follows redirects to addresses alone that could have been named."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        """Refuse a redirect to an address that is neither https nor http on this machine, or from https to http."""
        _require_safe(newurl)
        if urlsplit(req.full_url).scheme != urlsplit(newurl).scheme:
            raise PluginIndexError(f"{req.full_url} leads on to {newurl}", remedy=_OTHER_INDEX)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_safe(text: str) -> None:
    """Raise PluginIndexError for an address that is neither https nor http on this machine, or that holds a password."""
    parts = _split(text)
    if "@" in parts.netloc:
        raise PluginIndexError(
            "the address of the index holds a user or a password", remedy="Download the index and its wheels, and name the file"
        )
    if not parts.hostname or any(character.isspace() or not character.isprintable() for character in text):
        raise PluginIndexError(f"{text!r} is no address", remedy="Write https://HOST/PATH/index.json")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_this_machine(parts.hostname)):
        raise PluginIndexError(
            f"{text} is not read: whoever is on the way could change what {parts.scheme} brings",
            remedy="Use https, a file, or http on this machine",
        )


def _split(text: str) -> Any:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise PluginIndexError(f"{text!r} is no address: {error}", remedy="Write https://HOST/PATH/index.json") from error
    return parts


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
