"""The engine's own part of a saved state, next to that of the ranks."""

import json
from pathlib import Path
from typing import Final, Self

from attrs import asdict, frozen

from skyrl_engine.errors import CheckpointError

STATE_FILE: Final = "engine.json"


@frozen
class EngineState:
    """The number of optimizer steps of the weights, and facts that identify their model.

    `rotary_length` is the row length for which rotary frequencies were fixed (None: none was), `family` the model's type (None: nobody knows).
    """

    step: int
    rotary_length: int | None
    family: str | None

    def write(self, directory: Path) -> None:
        """Write the file into an existing directory."""
        (directory / STATE_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read what `write` wrote. Raises CheckpointError."""
        try:
            state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
            return cls(int(state["step"]), state.get("rotary_length"), state.get("family"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory / STATE_FILE} cannot be read: {error}",
                remedy="Load a directory that Engine.save wrote, of this version",
            ) from error

    def refuse_other_model(self, family: str | None, own: int | None) -> None:
        """Raise CheckpointError for a model of another family, whose adapters may have the same names and shapes, or with other frequencies."""
        if None not in (family, self.family) and family != self.family:
            raise CheckpointError(
                f"the checkpoint is of a model of the family {self.family}, and this one is of {family}",
                remedy="Load it into an engine over the model that it was trained from",
            )
        if self.rotary_length not in (None, own):
            raise CheckpointError(
                f"the checkpoint was trained with rotary frequencies for rows of {self.rotary_length:,} tokens, and this run would go on "
                f"with those for {'any number of' if own is None else format(own, ',')} tokens",
                remedy=f"Set model.rotary_length = {self.rotary_length}",
            )
