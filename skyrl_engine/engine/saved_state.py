"""The engine's own part of a saved state, beside that of the ranks."""

import json
from pathlib import Path
from typing import Final, Self

from attrs import asdict, frozen

from skyrl_engine.errors import CheckpointError

STATE_FILE: Final = "engine.json"


@frozen
class EngineState:
    """The number of optimizer steps behind the weights, and the row length for which rotary frequencies were fixed (None: none was)."""

    step: int
    rotary_length: int | None

    def write(self, directory: Path) -> None:
        """Write the file into an existing directory."""
        (directory / STATE_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read what `write` wrote. Raises CheckpointError."""
        try:
            state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
            return cls(int(state["step"]), state.get("rotary_length"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory / STATE_FILE} cannot be read: {error}",
                remedy="Load a directory that Engine.save wrote, of this version",
            ) from error

    def refuse_other_rotary(self, own: int | None) -> None:
        """Raise CheckpointError where training began with other rotary frequencies than the model has now."""
        if self.rotary_length not in (None, own):
            raise CheckpointError(
                f"the checkpoint was trained with rotary frequencies for rows of {self.rotary_length:,} tokens, and this run would go on "
                f"with those for {'any number of' if own is None else format(own, ',')} tokens",
                remedy=f"Set model.rotary_length = {self.rotary_length}",
            )
