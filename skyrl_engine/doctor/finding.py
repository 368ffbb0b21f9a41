"""One thing that was looked at, and what to do about it."""

from collections.abc import Callable, Iterable
from typing import Literal

from attrs import frozen

State = Literal["ok", "warning", "problem"]
"""`problem`: training or a plugin does not work. `warning`: it works, and may fail or be slow."""


@frozen
class DoctorFinding:
    """A thing that was looked at, how it is, and the one remedy; none where it is as it should be."""

    topic: str
    state: State
    found: str
    remedy: str | None = None


@frozen
class MachinePart:
    """A part of the machine, and how to look at it."""

    name: str
    examine: Callable[[], Iterable[DoctorFinding]]


def list_findings(part: MachinePart) -> list[DoctorFinding]:
    """Return what was found. An error of whatever sort is a finding too: one broken part hides no other."""
    found: list[DoctorFinding] = []
    try:
        found.extend(part.examine())
    except Exception as error:  # noqa: BLE001 - as above
        cause = f"it could not be looked at ({type(error).__name__}: {error})"
        found.append(DoctorFinding(part.name, "problem", cause, "Report this with `skyrl-engine doctor --report`"))
    return found
