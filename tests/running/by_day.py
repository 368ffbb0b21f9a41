"""Which of the many cases run before every change; `nox -s nightly` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def now(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """All values as parameters, those that are not `chosen` marked as nightly. A tuple holds a case's several parameters."""
    found = list(values)
    assert set(chosen) <= set(found), f"not among {found}"
    return [case if case in chosen else rarely(*case) if isinstance(case, tuple) else rarely(case) for case in found]


def rarely(*values: Any) -> Any:
    """Parameters of a case that `nox -s nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)
