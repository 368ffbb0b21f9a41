"""A training state that ranks write while the engine goes on."""

from pathlib import Path

from skyrl_engine.engine.saved_state import EngineState
from skyrl_engine.errors import EngineError
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.listing import FileFacts
from skyrl_engine.workers.messages import CollectSave, StageSave
from skyrl_engine.workers.staged_save import WrittenFiles


class StateSave:
    """A state that every rank has copied to host memory, and that a thread of each writes. `Engine.save_async` begins one."""

    def __init__(self, group: WorkerGroup, directory: Path, state: EngineState) -> None:
        self._group, self.directory = group, directory
        self._waiting = True
        self._written: list[WrittenFiles | None] = [None] * group.topology.world_size
        self._error: EngineError | None = None
        group.ask(StageSave(directory))
        state.write(directory)

    @property
    def seconds(self) -> float:
        """The wall seconds that the slowest rank took to write its files and to sum them, as far as ranks have ended."""
        return max((written.seconds for written in self._written if written is not None), default=0.0)

    def poll(self) -> bool:
        """Return True once every rank has written its files. Raises what one of them met, such as CheckpointError, each time."""
        self._collect(wait=False)
        return not self._waiting

    def result(self) -> dict[str, FileFacts]:
        """Wait until every rank has written its files; return their sizes and sums by their names in `directory`. Raises as `poll`."""
        self._collect(wait=True)
        return {name: facts for written in self._written if written is not None for name, facts in written.files.items()}

    def _collect(self, *, wait: bool) -> None:
        if self._error is not None:
            raise self._error
        if not self._waiting:
            return
        try:
            self._written = self._group.collect_written(self._written, CollectSave(wait))
        except EngineError as error:
            self._waiting, self._error = False, error
            raise
        self._waiting = any(written is None for written in self._written)
