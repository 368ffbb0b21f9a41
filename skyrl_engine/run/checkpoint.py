"""Checkpoints: written aside, fsynced, renamed, pointed at. A crash or a full disk at any moment leaves the previous one whole.

checkpoints/
- latest: the name of the checkpoint to resume from
- step-00000010/: whole by construction, for it got this name after everything in it was on the disk
  - state/: the backend's own files
  - model/: configuration, tokenizer and processors of the model, for exports
  - trainer.json, config.json, plugins.lock: documents of the trainer
  - best.json: of runs that look for the best checkpoint, which one it is
  - version.json: the version of the engine that wrote it
  - files.json: size and SHA-256 of every file above
- .step-00000020.partial: being written, or left over from a crash (removed at the next start)
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl_engine import __version__
from skyrl_engine.errors import CheckpointError, EngineError
from skyrl_engine.registry.discovery import ENGINE
from skyrl_engine.registry.known import install_command
from skyrl_engine.run.durable import sync, sync_tree, write_durably
from skyrl_engine.workers.listing import FileFacts, find_files, first_damage, list_files, sum_files

_STEP_NAME = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.(partial|replaced)|\.latest\.partial")
LISTING = "files.json"
"""Name of the list of a checkpoint's files."""
_VERSION = "version.json"
BEST_DOCUMENT = "best.json"
"""Document of runs that look for their best checkpoint."""
_BEFORE_IT_WAS_WRITTEN = "0.1"
"""The version of checkpoints that do not name theirs."""

logger = logging.getLogger(__name__)


@frozen
class Checkpoint:
    """A whole checkpoint on disk, after optimizer step `step`."""

    path: Path
    step: int

    @property
    def state(self) -> Path:
        """The directory the backend wrote."""
        return self.path / "state"

    @property
    def model(self) -> Path:
        """The directory that holds the model's configuration, tokenizer and processors."""
        return self.path / "model"

    def verify(self) -> None:
        """Compare every file with the listing, and the engine's version with this one.

        Raises CheckpointError naming the first file that differs, or a version whose checkpoints this engine does not read.
        """
        try:
            listing = json.loads((self.path / LISTING).read_text())
            damage = first_damage(self.path, listing, but=LISTING)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            damage = f"{LISTING} cannot be read ({error})"
        if damage:
            raise self.damage_error(damage)
        self._refuse_other_engine()

    def document(self, name: str) -> dict[str, Any]:
        """A JSON document that was saved with the state. Raises CheckpointError when it cannot be read."""
        try:
            document = json.loads((self.path / name).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise self.damage_error(f"{name} cannot be read ({error})") from error
        if not isinstance(document, dict):
            raise self.damage_error(f"{name} is no table")
        return document

    def read_best(self) -> dict[str, Any] | None:
        """Return the document of the run's best checkpoint as this one knew it; None where the run looked for none. Raises CheckpointError."""
        return self.document(BEST_DOCUMENT) if (self.path / BEST_DOCUMENT).exists() else None

    @property
    def best_step(self) -> int | None:
        """The step of the run's best checkpoint as this one knew it; None where there was none. Raises CheckpointError."""
        step = (self.read_best() or {}).get("step")
        if step is not None and not isinstance(step, int):
            raise self.damage_error(f"{BEST_DOCUMENT} names no step")
        return step

    def _refuse_other_engine(self) -> None:
        version = self.document(_VERSION).get("engine") if (self.path / _VERSION).exists() else _BEFORE_IT_WAS_WRITTEN
        if not isinstance(version, str) or not re.match(r"\d+\.\d+", version):
            raise self.damage_error(f"{_VERSION} names no version")
        if _series(version) == _series(__version__):
            return
        series, following = _series(version), _series(version, 1)
        command = install_command(f"{ENGINE}>={series},<{following}")
        raise CheckpointError(
            f"the checkpoint {self.path} was written by {ENGINE} {series}, and this is {__version__}, which does not read it",
            remedy=f"Resume or export it with the version that wrote it ({command}), or start a new run from its exported model",
        )

    def damage_error(self, damage: str) -> CheckpointError:
        """The error for a checkpoint that is not as it was written, with the way to another one."""
        others = [other.path.name for other in CheckpointStore(self.path.parent).all() if other.step != self.step]
        way_out = f"write {others[-1]!r} into {self.path.parent / 'latest'} and resume" if others else "start a new run"
        return CheckpointError(f"the checkpoint {self.path} is damaged: {damage}", remedy=f"Restore it from a copy, or {way_out}")


@frozen
class CheckpointStore:
    """The checkpoints of one run. `keep` is how many whole ones stay (None: all)."""

    directory: Path
    keep: int | None = None

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = [(_STEP_NAME.fullmatch(entry.name), entry) for entry in self.directory.iterdir() if entry.is_dir()]
        checkpoints = [Checkpoint(entry, int(match[1])) for match, entry in matches if match]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """The one to resume from: what `latest` names, or the newest where that name leads nowhere; None before the first."""
        pointer = self.directory / "latest"
        present = self.all()
        named = pointer.read_text(errors="replace").strip() if pointer.is_file() else None
        for checkpoint in present:
            if checkpoint.path.name == named:
                return checkpoint
        if named is not None and present:
            logger.warning("%s names %r, which does not exist; using %s", pointer, named, present[-1].path.name)
        return present[-1] if present else None

    def at(self, step: int | None) -> Checkpoint:
        """The checkpoint of optimizer step `step` (None: the latest). Raises CheckpointError when there is none."""
        checkpoint = self.latest() if step is None else next((saved for saved in self.all() if saved.step == step), None)
        if checkpoint is None:
            steps = ", ".join(str(saved.step) for saved in self.all())
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(
                f"{self.directory} holds {wanted}",
                remedy=f"Choose one of the steps {steps}" if steps else "Train with checkpoint.at_end = true or checkpoint.every",
            )
        return checkpoint

    def list_left_overs(self) -> list[Path]:
        """Return what a crash left half-written or half-deleted."""
        if not self.directory.is_dir():
            return []
        return [entry for entry in self.directory.iterdir() if _LEFT_OVER.fullmatch(entry.name)]

    def best(self) -> Checkpoint:
        """Return the best checkpoint, as the latest one knows it. Raises CheckpointError where there is none."""
        latest = self.at(None)
        if (step := latest.best_step) is None:
            raise CheckpointError(
                f"{latest.path} names no best checkpoint of its run",
                remedy='Train with evaluation.best, such as "loss", or choose a checkpoint with --step',
            )
        return self.at(step)

    def remove_left_overs(self) -> None:
        """Delete what a crash left half-written."""
        for entry in self.list_left_overs():
            logger.warning("removing %s, left over from an interrupted write", entry)
            _remove(entry)

    def save(
        self,
        step: int,
        write_state: Callable[[Path], None],
        documents: Mapping[str, Any],
        *,
        write_model: Callable[[Path], None] | None = None,
        list_state: Callable[[Path], dict[str, FileFacts]] = list_files,
    ) -> Checkpoint:
        """Write a checkpoint: `write_state` and `write_model` fill existing directories, `documents` are JSON by file name.

        `list_state` computes the sums of the files of the state, as `list_files` does, where others can do so together.

        Raises CheckpointError when anything fails; the previous checkpoint is then still there and whole, and `latest` names a whole one.
        """
        begun = self.begin(step, write_state, documents, write_model=write_model)
        return self.commit(begun, lambda: list_state(begun.state))

    def begin(
        self,
        step: int,
        write_state: Callable[[Path], None],
        documents: Mapping[str, Any],
        *,
        write_model: Callable[[Path], None] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint under a name by which it does not count, until `commit` follows or `abandon`; arguments as of `save`.

        `write_state` may leave the files of the state to others, who have written them when `commit` is called. Raises CheckpointError.
        """
        begun = Checkpoint(self.directory / f".step-{step:08d}.partial", step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if begun.path.exists():
                shutil.rmtree(begun.path)
            for folder, fill in ((begun.state, write_state), (begun.model, write_model)):
                if fill is not None:
                    folder.mkdir(parents=True)
                    fill(folder)
            for name, content in {**documents, _VERSION: {"engine": __version__}}.items():
                (begun.path / name).write_text(json.dumps(content, indent=2) + "\n")
        except Exception as error:
            raise self.abandon(begun, error) from error
        return begun

    def commit(self, begun: Checkpoint, list_state: Callable[[], Mapping[str, FileFacts]]) -> Checkpoint:
        """Make what `begin` began a checkpoint, with these sizes and sums of the files of the state, by their names there.

        Files of the state that are not among them are summed here. Raises CheckpointError, as `save`.
        """
        checkpoint = Checkpoint(self.directory / f"step-{begun.step:08d}", begun.step)
        try:
            state = {f"state/{name}": facts for name, facts in list_state().items()}
            others = sum_files(begun.path, sorted(name for name in find_files(begun.path) if name not in state))
            listing = dict(sorted({**state, **others}.items()))
            (begun.path / LISTING).write_text(json.dumps(listing, indent=2) + "\n")
            sync_tree(begun.path)
            self._publish(begun.path, checkpoint)
        except Exception as error:
            raise self.abandon(begun, error) from error
        self._retain(checkpoint)
        return checkpoint

    def abandon(self, begun: Checkpoint, error: Exception) -> CheckpointError:
        """Delete what `begin` began and `error` ended; return the error that says so."""
        shutil.rmtree(begun.path, ignore_errors=True)
        return self._write_error(begun.step, error)

    def _publish(self, partial: Path, checkpoint: Checkpoint) -> None:
        """Give the written directory its name and point `latest` at it."""
        replaced = None
        if checkpoint.path.exists():  # of a later step than the one resumed from: the new run of this step takes its place
            replaced = self.directory / f".{checkpoint.path.name}.replaced"
            _remove(replaced)
            checkpoint.path.rename(replaced)
        partial.rename(checkpoint.path)
        sync(self.directory)
        write_durably(self.directory / "latest", checkpoint.path.name + "\n")
        if replaced is not None:
            _remove(replaced)

    def _retain(self, newest: Checkpoint) -> None:
        """Delete all up to `newest` but the `keep` newest and the best one of each of these.

        Later ones belong to an abandoned continuation and are left alone.
        """
        if self.keep is None:
            return
        present = [saved for saved in self.all() if saved.step <= newest.step]
        best = {_best_step_despite_damage(saved) for saved in present[-self.keep :]}
        for old in present[: -self.keep]:
            if old.step not in best:
                _remove(old.path)

    def _write_error(self, step: int, error: Exception) -> CheckpointError:
        cause = error.cause if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        previous = self.latest()
        state = f"{previous.path.name} is whole" if previous else "no earlier one exists"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.directory} ({cause}); {state}",
            remedy=error.remedy
            if isinstance(error, EngineError)
            else "Free space there or make it writable, then resume the run with checkpoint.resume = true",
            details=error.details if isinstance(error, EngineError) else (),
        )


def _best_step_despite_damage(checkpoint: Checkpoint) -> int | None:
    try:
        return checkpoint.best_step
    except CheckpointError as error:
        logger.warning("%s", error.summary)
        return None


def _series(version: str, further: int = 0) -> str:
    """The versions whose checkpoints each other's engines read: "0.2" for 0.2.1; `further` counts on from there."""
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + further}"


def remove_aside(path: Path) -> None:
    """Delete a file or folder; a folder out of sight first: a half-deleted one must not look like a whole checkpoint. Raises OSError.

    Of a link the link goes, and what it names stays.
    """
    if path.is_dir() and not path.is_symlink():
        hidden = path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}.replaced"))
        shutil.rmtree(hidden)
    else:
        path.unlink()


def _remove(path: Path) -> None:
    """Delete a file or directory; one that will not go costs space, never a run."""
    try:
        remove_aside(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, error)
