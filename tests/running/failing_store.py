"""A store of objects in memory whose calls fail when they are told to: protocol `failing`, by fsspec's own in-memory file system."""

from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

CALLS = ("cat_file", "info", "find", "put_file", "pipe_file", "get_file", "rm_file")


class StoreOfTest(MemoryFileSystem):
    """Counts its calls in `calls`, and asks `before(number, name)`, which may raise what a store would."""

    protocol = "failing"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    calls: ClassVar[list[str]] = []
    before: ClassVar[Callable[[int, str], None] | None] = None

    @classmethod
    def begin(cls, before: Callable[[int, str], None] | None = None) -> None:
        """Empty the store, and count from 0."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.expect(before)

    @classmethod
    def expect(cls, before: Callable[[int, str], None] | None = None) -> None:
        """Count from 0, and ask `before` from now on."""
        cls.calls.clear()
        cls.before = staticmethod(before) if before is not None else None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("failing://", "memory://"))


def _counted(name: str) -> Callable[..., Any]:
    inner = getattr(MemoryFileSystem, name)

    def call(self: StoreOfTest, *arguments: Any, **options: Any) -> Any:
        StoreOfTest.calls.append(name)
        if StoreOfTest.before is not None:
            StoreOfTest.before(len(StoreOfTest.calls), name)
        return inner(self, *arguments, **options)

    return call


for _name in CALLS:
    setattr(StoreOfTest, _name, _counted(_name))
fsspec.register_implementation("failing", StoreOfTest, clobber=True)
