"""The words of errors for what a plugin's method returned, and the check of its type that every kind shares."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from skyrl_engine.errors import ResultError

Wanted = TypeVar("Wanted")


def describe_returned(value: object) -> str:
    """Return a short description of a value: its dtype and shape where it has them ("float32[3, 4]"), its type otherwise."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return "None" if value is None else type(value).__name__
    return f"{dtype}{list(shape)}"


def require_returned(label: str, method: str, value: object, wanted: type[Wanted]) -> Wanted:
    """Return the value as what it is due to be. Raises ResultError, naming the plugin (`label`) and the method, for another type."""
    if not isinstance(value, wanted):
        article = "an" if wanted.__name__[0] in "AEIOUaeiou" else "a"
        raise ResultError(
            f"{label} returned {describe_returned(value)} from {method}", remedy=f"Return {article} {wanted.__name__} from {method}"
        )
    return value


def require_vector(label: str, method: str, name: str, value: object, dtype: npt.DTypeLike, length: int | None = None) -> None:
    """Raise ResultError where `name` of what a method returned is no NumPy vector of this dtype and, unless None, this length."""
    fits = isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1 and length in (None, len(value))
    if not fits:
        form = f"{np.dtype(dtype)}[{'n' if length is None else length}]"
        raise ResultError(
            f"{label} returned {describe_returned(value)} as {name} from {method}", remedy=f"Return a NumPy array {form} as {name}"
        )


def require_all(label: str, method: str, name: str, values: object, wanted: type) -> None:
    """Raise ResultError where `name` of what a method returned is no list or tuple of `wanted`."""
    if not isinstance(values, list | tuple):
        raise ResultError(
            f"{label} returned {describe_returned(values)} as {name} from {method}",
            remedy=f"Return a list or tuple of {wanted.__name__} as {name}",
        )
    refuse_others(label, method, name, values, wanted)


def refuse_others(label: str, method: str, name: str, values: Iterable[object], wanted: type) -> None:
    """Raise ResultError for the first of `values` that is no `wanted`."""
    for place, value in enumerate(values):
        if not isinstance(value, wanted):
            raise ResultError(
                f"{label} returned {describe_returned(value)} at place {place} of {name} from {method}",
                remedy=f"Return only {wanted.__name__} in {name}",
            )


def require_table(label: str, method: str, name: str, table: object, wanted: type) -> "Mapping[str, Any]":
    """Return a table of `wanted` by name. Raises ResultError where `name` of what a method returned is something else."""
    if not isinstance(table, Mapping):
        raise ResultError(
            f"{label} returned {describe_returned(table)} as {name} from {method}",
            remedy=f"Return a dict from names to {wanted.__name__} as {name}",
        )
    for key, value in table.items():
        if not isinstance(key, str) or not isinstance(value, wanted):
            raise ResultError(
                f"{label} returned {describe_returned(value)} as {name}[{key!r}] from {method}",
                remedy=f"Return a dict from names to {wanted.__name__} as {name}",
            )
    return table
