"""Downloads of checkpoints: addresses that are secrets, good for a while, and a folder as one tar file.

A browser or `curl` downloads without the server's key, so an address is as good as the key for its one file.
"""

import secrets
import tarfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from attrs import define, field

GOOD_SECONDS = 900.0
"""Seconds that an address is good."""

CHUNK = 1 << 20
BLOCK = 512
"""The unit of a tar file."""


@define
class Downloads:
    """Files and folders by the secrets of their addresses, with the moment at which these end."""

    _by_secret: dict[str, tuple[float, Path]] = field(factory=dict)

    def offer(self, path: Path) -> str:
        """Return a secret for a file or a folder."""
        now = time.monotonic()
        self._by_secret = {secret: entry for secret, entry in self._by_secret.items() if entry[0] > now}
        secret = secrets.token_urlsafe(32)
        self._by_secret[secret] = now + GOOD_SECONDS, path
        return secret

    def find(self, secret: str) -> Path | None:
        """Return what a secret stands for, if its time is not over."""
        end, path = self._by_secret.get(secret, (0.0, Path()))
        return path if end > time.monotonic() else None


def expires() -> str:
    """Return when an address that is made now ends, as ISO 8601 in UTC."""
    return datetime.fromtimestamp(time.time() + GOOD_SECONDS, UTC).isoformat()


def tar(folder: Path) -> Iterator[bytes]:
    """Yield the files of a folder as a tar file, a piece at a time."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        about = tarfile.TarInfo(file.relative_to(folder).as_posix())
        about.size, about.mtime = file.stat().st_size, int(file.stat().st_mtime)
        yield about.tobuf()
        with file.open("rb") as opened:
            while piece := opened.read(CHUNK):
                yield piece
        yield bytes(-about.size % BLOCK)
    yield bytes(2 * BLOCK)
