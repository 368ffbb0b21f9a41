"""A file or folder of an object store, and calls to its store, each of which is tried again a bounded number of times."""

import logging
import time
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar

from attrs import evolve, frozen

from skyrl_engine.errors import StoreError
from skyrl_engine.object_store.address import hide_secrets, refuse_secrets
from skyrl_engine.registry.known import install_command

T = TypeVar("T")

logger = logging.getLogger(__name__)

PAUSES: Final = (0.5, 2.0, 8.0)
"""Seconds before the second and each further try of a call. A store's own client tries again on top of that."""

_FINAL: Final = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    MemoryError,
)
"""Errors that the next try meets again."""


@frozen(eq=False)
class StorePlace:
    """A file or folder: `address` as the user wrote it, and `path`, its name in `files`, the file system of fsspec that reads the store."""

    address: str
    path: str
    files: Any

    @classmethod
    def of(cls, address: str) -> Self:
        """Find the file system for an address. Nothing is asked of the store.

        Raises StoreError for an address with a secret, a protocol that nobody knows, and a package that is not installed.
        """
        refuse_secrets(address)
        import fsspec

        try:
            files, path = fsspec.core.url_to_fs(address)
        except ImportError as error:
            raise _missing_package(address, error) from error
        except Exception as error:  # every file system refuses what it cannot use in its own way
            known = not isinstance(error, ValueError) or "Protocol not known" not in str(error)
            raise StoreError(
                f"the address {address} cannot be used: {first_line(error)}",
                remedy="Correct it, and the settings of the store's client"
                if known
                else "Correct the protocol, the part before ://",
            ) from error
        return cls(address.rstrip("/"), str(path).rstrip("/"), files)

    def __truediv__(self, name: str) -> Self:
        """Return a place below this one."""
        return evolve(self, address=f"{self.address}/{name}", path=f"{self.path}/{name}")

    def __str__(self) -> str:
        return self.address

    @property
    def protocols(self) -> frozenset[str]:
        """The names of the file system's protocol, such as `{"file", "local"}`."""
        names = self.files.protocol
        return frozenset([names] if isinstance(names, str) else names)

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.path.rsplit("/", 1)[-1]

    def call(self, do: Callable[[], T], *, doing: str = "read") -> T:
        """Call the store, up to `1 + len(PAUSES)` times. `doing` is a verb for messages.

        Raises FileNotFoundError, and StoreError for anything else that the last try met.
        """
        for pause in (*PAUSES, None):
            try:
                return do()
            except FileNotFoundError:
                raise
            except Exception as error:  # the clients of stores raise classes of their own
                if pause is None or isinstance(error, _FINAL):
                    raise self._failed(error, doing, tries=len(PAUSES) + 1 if pause is None else 1) from error
                logger.warning("cannot %s %s (%s); trying again in %g s", doing, self, first_line(error), pause)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _failed(self, error: Exception, doing: str, *, tries: int) -> StoreError:
        if isinstance(error, ImportError):
            return _missing_package(self.address, error)
        times = f" after {tries} tries" if tries > 1 else ""
        return StoreError(
            f"the store cannot {doing} {self}{times}: {first_line(error)}",
            remedy="Check the address, the credentials and the network (the client's own settings, such as AWS_ENDPOINT_URL), and start again",
        )

    def size(self) -> int:
        """Return the bytes of a file. Raises FileNotFoundError and StoreError."""

        def ask() -> int:
            self.files.invalidate_cache()
            facts = self.files.info(self.path)
            if facts.get("type") == "directory":
                raise FileNotFoundError(self.address)
            if facts.get("size") is None:
                raise OSError("it does not say how long the file is")
            return int(facts["size"])

        return self.call(ask)

    def find(self) -> dict[str, int]:
        """Return the files at any depth below a folder: their names from there on, and their bytes. Raises StoreError."""

        def ask() -> dict[str, int]:
            self.files.invalidate_cache()
            found = self.files.find(self.path, detail=True)
            return {path: int(facts["size"] or 0) for path, facts in found.items() if facts.get("type") != "directory"}

        try:
            found = self.call(ask, doing="list")
        except FileNotFoundError:
            return {}
        start = "/" + self.path.strip("/") + "/"
        names = {"/" + path.strip("/"): size for path, size in found.items()}
        return {path.removeprefix(start): size for path, size in sorted(names.items()) if path.startswith(start)}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its class, without secrets."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return hide_secrets(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _missing_package(address: str, error: ImportError) -> StoreError:
    from fsspec.registry import known_implementations

    protocol = address.partition("://")[0]
    known = known_implementations.get(protocol, {}).get("class", "")
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    package = (cause.name or known).partition(".")[0]
    if known and not known.startswith("fsspec."):
        package = known.partition(".")[0]
    return StoreError(
        f"{protocol}:// addresses need the package {package or 'of their file system'}, which is not installed or cannot be imported",
        remedy=f"Install it: {install_command(package)}" if package else f"Install what {first_line(cause)} asks for",
        details=[first_line(cause)],
    )
