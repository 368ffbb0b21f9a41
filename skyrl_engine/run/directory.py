"""The run directory: everything one run writes, owned by one process at a time."""

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from attrs import field, frozen

from skyrl_engine.errors import ConfigError, EngineError, Problem
from skyrl_engine.run.lock import Work, hold_lock

RUNS = Path("runs")
_LOCK = ".lock"
_OWN_NAMES = frozenset(
    {
        _LOCK,
        "run.json",
        "run.log",
        "config.toml",
        "metrics.jsonl",
        "checkpoints",
        "model",
        "rollouts",
        "reference",
        "generator",
        "samples.json",
        "report.html",
        "profile",
        "store.json",
    }
)


@frozen
class RunDirectory:
    """The places of a run's parts. Nothing else in the engine spells these names.

    `created` are folders that were made for it, the innermost first; `empty` says that there was nothing in it when it was opened.
    """

    path: Path
    created: tuple[Path, ...] = field(default=(), eq=False)
    empty: bool = field(default=False, eq=False)

    @property
    def lock_file(self) -> Path:
        return self.path / _LOCK

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """A few samples of the first mini-batch."""
        return self.path / "samples.json"

    @property
    def store(self) -> Path:
        """The place in an object store that holds a copy of the run, and which copy is the last."""
        return self.path / "store.json"

    @property
    def report(self) -> Path:
        """The run for people to look at, in one file."""
        return self.path / "report.html"

    @property
    def profile(self) -> Path:
        """Traces of torch's profiler, a file for each rank."""
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """The journal of a run by reinforcement."""
        return self.path / "rollouts"

    @property
    def reference(self) -> Path:
        """Copies of the trained model that became its reference, by step."""
        return self.path / "reference"

    @property
    def generator(self) -> Path:
        """Logs of generators outside of the ranks, and weights on their way to them."""
        return self.path / "generator"

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face directory, written at the end of a run."""
        return self.path / "model"

    def remove_model(self) -> None:
        """Delete the trained model, out of sight first: a half-deleted folder must not look like a whole model."""
        if self.model.exists():
            aside = self.model.with_name(f".{self.model.name}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            self.model.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def remove_traces(self) -> None:
        """Delete what a run wrote that ended before it began, and the folders that were made for it; nothing that was there before.

        What cannot be deleted stays.
        """
        if not self.empty:
            return
        for name in _OWN_NAMES:
            place = self.path / name
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                with suppress(OSError):
                    place.unlink()
        with suppress(OSError):
            for folder in self.created:
                folder.rmdir()

    @contextmanager
    def lock(self, work: Work = "run") -> Iterator[None]:
        """Hold the directory for this process; the kernel lets go when the process ends, however it ends. `work` tells others what for.

        Raises EngineError when another process holds it, or nothing can be written there.
        """
        with _usable(self.path), ExitStack() as stack:
            stack.enter_context(hold_lock(self.lock_file, work))
            held = stack.pop_all()
        with held:
            yield


def open_run_directory(configured: str | None, *, name: str, resume: bool) -> RunDirectory:
    """The run directory, created where it is missing: `configured`, or a new `runs/<UTC time>-<name>`.

    Raises ConfigError when the directory holds another run and `resume` is false, when it holds other files and no run, or when there is
    nothing to say which run to resume; EngineError when it cannot be made or read.
    """
    if configured is None:
        if resume:
            raise _problem("resuming needs to know which run", "Set run.directory to the directory of the run to resume")
        with _usable(RUNS):
            return _create_new(RUNS, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{short_name(name)}")
    path = Path(configured).expanduser()
    missing = _list_missing(path)
    if path.exists() and not path.is_dir():
        raise _problem(f"{path} is a file", "Name a new directory")
    with _usable(path):
        path.mkdir(parents=True, exist_ok=True)
        present = {entry.name for entry in path.iterdir()}
    foreign = sorted(name for name in present - _OWN_NAMES if not _is_written_aside(name))
    if foreign and "run.json" not in present:  # in a run's own directory they are its observers', or its owner's
        raise _problem(f"{path} holds files that belong to no run, such as {foreign[0]!r}", "Name a new or empty directory")
    if present - {_LOCK, "run.log"} and not resume:
        raise _problem(f"{path} already holds a run", "Name a new directory, or set checkpoint.resume = true to continue that run")
    return RunDirectory(path, missing, empty=not present)


def _list_missing(path: Path) -> tuple[Path, ...]:
    """Return the folders that must be made for `path`, itself included, the innermost first."""
    return tuple(folder for folder in (path, *path.parents) if not folder.exists())


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"the run directory {path} cannot be used ({error.strerror})",
            remedy="Make it readable and writable, or set another run.directory",
        ) from error


def short_name(text: str) -> str:
    """`text` as a piece of a file name: lower-case letters, digits, dots and dashes, at most 40 of them."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:40].strip("-.") or "run"


def _create_new(parent: Path, name: str) -> RunDirectory:
    """A directory that did not exist before; runs started within one second get a number."""
    attempt = 1
    while True:
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        missing = _list_missing(path)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():  # it is in the way itself: a link that leads nowhere
                raise
            attempt += 1
        else:
            return RunDirectory(path, missing, empty=True)


def _is_written_aside(name: str) -> bool:
    """Tell whether a crash can leave a half-written file of a run under this name."""
    return name.startswith(".") and name.endswith(".partial")


def _problem(cause: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("run.directory", cause, remedy)])
