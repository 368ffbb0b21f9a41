"""The objects that a rank holds between calls: one of each purpose, made on the rank and called by name.

Calls reach a rank as plain functions, so what they speak of must lie somewhere. Both users of a world lie here: the kit's backend, which is
driven through the contract alone, and the engine's worker.
"""

from collections.abc import Callable
from typing import Any, Literal

Purpose = Literal["backend", "worker"]

_held: dict[Purpose, Any] = {}


def hold(purpose: Purpose, make: Callable[..., Any], *arguments: Any) -> None:
    """Make the object of this purpose, after closing the one before, which an earlier failure may have left."""
    let_go(purpose)
    _held[purpose] = make(*arguments)


def get_held(purpose: Purpose) -> Any:
    """Return the object of this purpose."""
    return _held[purpose]


def call_held(purpose: Purpose, method: str, *arguments: Any) -> Any:
    """Call a method of the object."""
    return getattr(_held[purpose], method)(*arguments)


def let_go(purpose: Purpose) -> None:
    """Close the object, if there is one."""
    if purpose in _held:
        _held.pop(purpose).close()
