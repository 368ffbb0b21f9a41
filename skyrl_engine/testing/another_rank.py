"""Differences between processes: the rank's environment variables, and hashes of texts."""

import builtins
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ANOTHER_RANK = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "CUDA_VISIBLE_DEVICES": "1",
}
"""The environment of a rank that is not the first, as launchers set it."""


_hash = hash


def _hash_of_another_process(value: object) -> int:
    """Return `hash(value)` as under another PYTHONHASHSEED where code asks for that of a text; objects keep theirs, or dictionaries break."""
    own = type(value) in (str, bytes) and sys._getframe(1).f_code.co_name != "__hash__"  # noqa: SLF001 - there is no other way to the caller
    return _hash(value) ^ 0x5EED if own else _hash(value)


@contextmanager
def another_rank() -> Iterator[None]:
    """Set the environment of another rank and give texts other hashes, as other processes have them; restore both afterwards."""
    before = {name: os.environ.get(name) for name in ANOTHER_RANK}
    os.environ.update(ANOTHER_RANK)
    builtins.hash = _hash_of_another_process
    try:
        yield
    finally:
        builtins.hash = _hash
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
