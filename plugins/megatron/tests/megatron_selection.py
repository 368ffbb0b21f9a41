"""Which cases run by default; the others are proofs, or one of the many that few people wait for."""

from collections.abc import Iterable
from typing import Any

import pytest


def now(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """All values as parameters, those that are not `chosen` marked as proofs."""
    found = list(values)
    assert set(chosen) <= set(found), f"not among {found}"
    return [each if each in chosen else pytest.param(each, marks=pytest.mark.proof) for each in found]


def rarely(*values: Any) -> Any:
    """Parameters of a case that `nox -s nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)
