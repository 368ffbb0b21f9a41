"""A metrics file as it grows: each whole record once, and a beginning again where a resumed session wrote the file anew."""

import os
from pathlib import Path
from typing import Any

from attrs import define, field

from skyrl_engine.run.metrics import parse_line


@define
class MetricsFollower:
    """Reads `path` from where the last call ended. The file may not be there yet."""

    path: Path
    _offset: int = field(default=0, init=False)
    _file: tuple[int, int] | None = field(default=None, init=False)

    def read_new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return the records that were written since the last call, and whether they replace all that were read before. Raises OSError."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False, []
        with file:
            facts = os.fstat(file.fileno())
            identity = facts.st_dev, facts.st_ino
            again = self._file is not None and (identity != self._file or facts.st_size < self._offset)
            if again:
                self._offset = 0
            self._file = identity
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return again, [record for line in whole.splitlines() if (record := parse_line(line)) is not None]
