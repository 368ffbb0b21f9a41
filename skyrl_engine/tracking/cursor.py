"""The place in a run up to which a tracker has been sent it, in a file of the run directory that a kill leaves whole."""

import json
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Self

from attrs import define

FOLDER = "trackers"
"""Folder of the run directory with one cursor for each tracker."""


class Part(IntEnum):
    """The parts of a step, in the order in which observers are told them."""

    ROLLOUTS = 0
    STEP = 1
    EVALUATION = 2
    CHECKPOINT = 3


class SentPosition(NamedTuple):
    """A part of a step; positions are ordered as a run goes."""

    step: int
    part: Part


BEFORE_ALL = SentPosition(-1, Part.CHECKPOINT)


@define
class Cursor:
    """The last position that was sent, and the tracker's own id of the run; None: none was opened yet."""

    path: Path
    run_id: str | None = None
    position: SentPosition = BEFORE_ALL

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a cursor; one that is not there, or cannot be read, stands before all."""
        try:
            stated = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, str(stated["run_id"]), SentPosition(int(stated["step"]), Part(stated["part"])))
        except (OSError, ValueError, TypeError, KeyError):
            return cls(path)

    def write(self) -> None:
        """Replace the file in one step. It is not synced: a kill of the process loses nothing, and syncing would cost a disk's time a step."""
        self.path.parent.mkdir(exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.partial")
        text = json.dumps({"run_id": self.run_id, "step": self.position.step, "part": int(self.position.part)})
        aside.write_text(text + "\n", encoding="utf-8")
        aside.replace(self.path)

    def advance(self, position: SentPosition) -> None:
        """Move to a position that was sent."""
        self.position = position
        self.write()
