"""A rank's part of a checkpoint while a thread writes it: the files, their sums, or the failure."""

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from attrs import frozen

from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.errors import ResultError
from skyrl_engine.workers.listing import FileFacts, sum_files


@frozen
class WrittenFiles:
    """The files that a rank wrote, with their sums by name, and the wall seconds that its thread took for both."""

    files: dict[str, FileFacts]
    seconds: float


class StagedSave:
    """Writes what a backend staged, and sums its files, in a thread of its own that begins at once. `label` names the backend in errors."""

    def __init__(self, label: str, write: Callable[[], Collection[str]], directory: Path) -> None:
        self._label, self._write, self._directory = label, write, directory
        self._written: WrittenFiles | None = None
        self._error: BaseException | None = None
        # a process that is told to end at once does not wait for it
        self._thread = threading.Thread(target=self._run, name="skyrl-engine-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            names = self._write()
            self._require_names(names)
            files = sum_files(self._directory, sorted(names))
            self._written = WrittenFiles(files, time.perf_counter() - began)
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is taken
            self._error = error

    def _require_names(self, names: object) -> None:
        if isinstance(names, Collection) and not isinstance(names, str):
            strange = [name for name in names if not (isinstance(name, str) and (self._directory / name).is_file())]
            if not strange:
                return
            names = strange[0]
        raise ResultError(
            f"what {self._label} returned from stage_save returned {describe_returned(names)}, which names no file that is there",
            remedy="Return the names of the files that this rank wrote, relative to the directory",
        )

    def collect(self, *, wait: bool) -> WrittenFiles | None:
        """Return what was written, None while it is under way unless it is to be waited for. Raises what writing raised."""
        if wait:
            self._thread.join()
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._written

    def end(self) -> None:
        """Wait for the thread, whatever it met."""
        self._thread.join()
