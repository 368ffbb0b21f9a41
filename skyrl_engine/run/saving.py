"""Checkpoints of a run as they are written: at once, or one at a time while training goes on.

- A checkpoint is whole or it does not count: what is under way has a name that nobody reads (`run.checkpoint`).
- Its documents are those of the step that it is of: they are written when it begins.
- Checkpoints become whole in the order of their steps: the one under way is waited for before the next begins.
- Retention looks at whole checkpoints, when one has become so.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from attrs import define

from skyrl_engine.contracts.kinds.observer import CheckpointSaved
from skyrl_engine.run.checkpoint import Checkpoint, CheckpointStore
from skyrl_engine.workers.listing import FileFacts


class StateUnderWay(Protocol):
    """A state that ranks write, as `Engine.save_async` returns it."""

    def poll(self) -> bool:
        """Return True once its files are there. Raises what writing met."""

    def result(self) -> Mapping[str, FileFacts]:
        """Wait for them; return their sizes and sums. Raises what writing met."""


class StateSource(Protocol):
    """The ranks whose state is saved: `Engine`."""

    def save(self, directory: Path, /) -> None:
        """Write the state into a directory."""

    def save_async(self, directory: Path, /) -> StateUnderWay:
        """Copy the state, and begin to write it into a directory."""

    def keep_model_files(self, directory: Path, /) -> None:
        """Write into a directory what an export needs beside weights."""

    def list_files(self, directory: Path, /) -> dict[str, FileFacts]:
        """Return sizes and sums of the files under a directory."""


@define(eq=False)
class _UnderWay:
    begun: Checkpoint
    state: StateUnderWay
    began_at: float
    blocked: float = 0.0

    @contextmanager
    def measure_blocked_time(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.blocked += time.perf_counter() - started


@define(eq=False)
class Saving:
    """Writes the checkpoints of one run into its store, and knows the one that is under way."""

    store: CheckpointStore
    before_commit: Callable[[], None] | None = None
    """Called before a checkpoint becomes whole, and older ones may be deleted."""
    _under_way: _UnderWay | None = None

    def begin(
        self, step: int, source: StateSource, documents: Mapping[str, Any], *, asynchronous: bool
    ) -> tuple[CheckpointSaved, ...]:
        """Write a checkpoint of `step`, or begin it where it is `asynchronous`. Returns what is whole since the last call.

        Raises CheckpointError for this one or the one before it.
        """
        began_at = time.perf_counter()
        before = self.look(wait=True)
        if not asynchronous:
            self._prepare_commit()
            saved = self.store.save(step, source.save, documents, write_model=source.keep_model_files, list_state=source.list_files)
            seconds = time.perf_counter() - began_at
            return (*before, CheckpointSaved(step, saved.path, seconds, seconds))
        states: list[StateUnderWay] = []
        begun = self.store.begin(
            step, lambda folder: states.append(source.save_async(folder)), documents, write_model=source.keep_model_files
        )
        self._under_way = _UnderWay(begun, states[0], began_at, time.perf_counter() - began_at)
        return before

    def look(self, *, wait: bool) -> tuple[CheckpointSaved, ...]:
        """Make a checkpoint of what is under way, where its files are there or it is to `wait` for them; returns it.

        Raises CheckpointError; then nothing is under way any more.
        """
        if (under_way := self._under_way) is None:
            return ()
        with under_way.measure_blocked_time():
            if not wait and not self._is_written(under_way):
                return ()
            self._under_way = None
            self._prepare_commit()
            saved = self.store.commit(under_way.begun, under_way.state.result)
        return (CheckpointSaved(saved.step, saved.path, time.perf_counter() - under_way.began_at, under_way.blocked),)

    def _prepare_commit(self) -> None:
        if self.before_commit is not None:
            self.before_commit()

    def _is_written(self, under_way: _UnderWay) -> bool:
        try:
            return under_way.state.poll()
        except Exception:  # noqa: BLE001 - see below
            # committing it raises the same, with what it means
            return True
