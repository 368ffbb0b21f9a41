"""One session of a run: its directory, log, manifest, checkpoints and observers, from the first line of the log to the last event.

A run has one session, and one more each time it is resumed.
"""

import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.automatic import list_automatic_keys, with_recorded_choices
from skyrl_engine.config.find_trainer import find_trainer_record
from skyrl_engine.config.locking import TRAINER
from skyrl_engine.config.trust.gate import seal_run
from skyrl_engine.config.trust.seal import ENTRY
from skyrl_engine.config.trust.user_key import VARIABLE, key_file, make_key
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.observer import (
    CheckpointSaved,
    EvaluationFinished,
    RolloutsFinished,
    SessionFinished,
    SessionStarted,
    StepFinished,
)
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.errors import CheckpointError, EngineError
from skyrl_engine.run.checkpoint import BEST_DOCUMENT, Checkpoint, CheckpointStore
from skyrl_engine.run.directory import RunDirectory, open_run_directory
from skyrl_engine.run.durable import write_durably
from skyrl_engine.run.environment import describe_environment
from skyrl_engine.run.kept_samples import keep_samples
from skyrl_engine.run.log import logging_to
from skyrl_engine.run.manifest import begin_session, end_session, new_manifest, read_manifest, write_manifest
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.run.mirror import Mirror
from skyrl_engine.run.observer_calls import ObserverBus
from skyrl_engine.run.report_writer import ReportWriter
from skyrl_engine.run.resume_checks import (
    OLDER_RULE,
    base_of,
    find_changed_keys,
    has_older_rule,
    refuse_changed_plugins,
    refuse_other_base,
    refuse_other_trainer,
)
from skyrl_engine.run.saving import Saving, StateSource
from skyrl_engine.run.stop import StopRequest, listen_for_stop

logger = logging.getLogger(__name__)

PLUGINS_DOCUMENT = "plugins.lock"
CONFIG_DOCUMENT = "config.json"
BASE_DOCUMENT = "base.json"
TRAINER_DOCUMENT = "trainer.json"
_TOLD = ("loss", "reward/mean", "grad_norm", "learning_rate", "tokens", "async/staleness_mean", "async/waited_seconds")
"""Metrics of a step's line in run.log; all of them are in metrics.jsonl."""


@define(eq=False)
class RunSession:
    """A trainer's hold on its run: directory, checkpoints, observers. Made by `open_session`."""

    directory: RunDirectory
    checkpoints: CheckpointStore
    stop: StopRequest
    resumed_from: Checkpoint | None
    changed: list[str]
    _resolved: ResolvedConfig
    _bus: ObserverBus
    _report: ReportWriter
    _key: bytes | None = None
    _manifest: dict[str, Any] | None = None
    step: int = 0
    mirror: Mirror | None = None
    _saved: int | None = field(default=None, init=False)
    _saving: Saving = field(init=False)
    _fingerprint: dict[str, Any] | None = field(default=None, init=False)

    @_saving.default
    def _none_under_way(self) -> Saving:
        return Saving(self.checkpoints, None if self.mirror is None else self.mirror.wait)

    @property
    def resolved(self) -> ResolvedConfig:
        """The configuration of the run, with what it chose itself where it goes on."""
        return self._resolved

    def record_start(
        self, resolved: ResolvedConfig, *, seeds: Mapping[str, int], world: Mapping[str, Any], data: Mapping[str, Any]
    ) -> None:
        """Write config.toml and run.json: a new manifest, or the resumed run's with one session more.

        `resolved` is the configuration as preparation left it, with everything chosen.
        """
        open_keys = list_automatic_keys(resolved)
        assert not open_keys, f"a prepared run has chosen {open_keys}"
        self._resolved = resolved
        locks = _lock_plugins(self._resolved)
        if self._manifest is None:
            self._manifest = new_manifest(
                plugins=locks,
                observers=[observer.to_lock_entry() for observer in self._resolved.observers],
                config=self._resolved.as_dict(),
                origins={key: str(origin) for key, origin in self._resolved.origins.items()},
                seeds=seeds,
                world=world,
                data=data,
                environment=describe_environment(),
                extra=self._bus.manifest_extra(),
            )
        begin_session(self._manifest, start_step=self.step, plugins=locks, changed=self.changed)
        text = self._resolved.to_toml()
        self._manifest[ENTRY] = self._seal(text)
        write_manifest(self.directory.manifest, self._manifest)
        write_durably(self.directory.config, text)

    def _seal(self, config: str) -> dict[str, Any] | None:
        """Return the seal by which this user's commands know the run again; None without a key."""
        if self._key is None:
            return None
        return seal_run(tomllib.loads(config), self._resolved.hash_code_files()).sign(self._key)

    @property
    def began(self) -> bool:
        """Return True if a start was recorded, of this session or of one before it."""
        return self._manifest is not None

    def keep_samples(self, columns: SampleColumns, mini_batch: IntArray) -> None:
        """Keep a few samples of a mini-batch for people to look at; a disk that refuses them is warned of, and stops nothing."""
        try:
            keep_samples(self.directory.samples, columns, mini_batch)
        except OSError as error:
            logger.warning("%s cannot be written (%s): a report will show no samples", self.directory.samples, error)

    def announce_start(self, total_steps: int) -> None:
        """Tell observers that training begins."""
        assert self._manifest is not None, "record_start comes first"
        logger.info("training from step %d to %d in %s", self.step, total_steps, self.directory.path)
        self._bus.session_started(SessionStarted(self.directory.path, self._manifest, total_steps, self.step))
        self.stop.can_wait = True

    def rollouts_finished(self, event: RolloutsFinished) -> None:
        """Tell observers."""
        self._bus.rollouts_finished(event)

    def step_finished(self, event: StepFinished) -> None:
        """Tell observers; from here on the session is at this step."""
        self.step = event.step
        parts = [f"{name} {event.metrics[name]:.4g}" for name in _TOLD if name in event.metrics]
        logger.info("step %d of %d: %s", event.step, event.total_steps, ", ".join([*parts, f"{event.seconds:.3g} s"]))
        self._bus.step_finished(event)
        self._report.write_if_due()

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        logger.info("evaluation after step %d: %s", event.step, dict(event.metrics))
        self._bus.evaluation_finished(event)

    def save_checkpoint(
        self, source: StateSource, trainer: Mapping[str, Any], best: Mapping[str, Any] | None = None, *, asynchronous: bool = False
    ) -> None:
        """Write a checkpoint of the present step, unless there is one of it already, and tell observers. Raises CheckpointError.

        `trainer` is the trainer's own document, `best` that of the best checkpoint of runs that look for one. What is `asynchronous` counts
        from a later `look_at_saves` on; the one before it is waited for.
        """
        if self.step == self._last_saved_step():
            return
        documents = {
            TRAINER_DOCUMENT: dict(trainer),
            PLUGINS_DOCUMENT: _lock_plugins(self._resolved),
            CONFIG_DOCUMENT: self._resolved.as_dict(),
            BASE_DOCUMENT: self._base(),
        }
        if best is not None:
            documents[BEST_DOCUMENT] = dict(best)
        self.directory.remove_model()  # of an earlier end of this run; from now on it would be older than the newest checkpoint
        self._tell_of_saves(self._saving.begin(self.step, source, documents, asynchronous=asynchronous))
        self._saved = self.step

    def look_at_saves(self, *, wait: bool = False) -> None:
        """Make a checkpoint of what was written meanwhile, if it is whole or is to be waited for; tell observers. Raises CheckpointError."""
        self._tell_of_saves(self._saving.look(wait=wait))

    def end_saves_despite(self, error: Exception) -> None:
        """Wait for a checkpoint under way of a run that ends by `error`, which stays the error, whatever this meets."""
        try:
            self.look_at_saves(wait=True)
        except Exception as other:  # noqa: BLE001 - see above
            if other is not error:
                logger.warning("%s", other.summary if isinstance(other, EngineError) else f"{type(other).__name__}: {other}")

    def _tell_of_saves(self, events: Sequence[CheckpointSaved]) -> None:
        for event in events:
            logger.info("checkpoint %s (%.3g s, of which training waited %.3g s)", event.path, event.seconds, event.blocked_seconds)
            self._bus.checkpoint_saved(event)
        if events and self.mirror is not None:
            self.mirror.copy(events[-1].step)

    def _last_saved_step(self) -> int | None:
        if self._saved is not None:
            return self._saved
        return self.resumed_from.step if self.resumed_from else None

    def _base(self) -> dict[str, Any]:
        if self._fingerprint is None:
            self._fingerprint = base_of(self._resolved.config.model)
        return self._fingerprint

    def _finish(self, error: str | None) -> None:
        """The session's last words, in the manifest and to the observers."""
        if self._manifest is not None:
            end_session(self._manifest, step=self.step, error=error)
            write_manifest(self.directory.manifest, self._manifest)
        self._bus.session_finished(SessionFinished(self.step, error))
        if self._manifest is not None:
            self._report.write_last(wait=error is None and not self.stop)
        self._finish_copy(error)

    def _finish_copy(self, error: str | None) -> None:
        """Bring what the end of the session wrote to the store, where it ends well and has a checkpoint."""
        if self.mirror is None:
            return
        if error is None and (latest := self.checkpoints.latest()) is not None:
            self.mirror.copy(latest.step, with_model=True)
        self.mirror.wait(last=error is None)


@contextmanager
def open_session(
    resolved: ResolvedConfig,
    *,
    observers: Sequence[object] = (),
    resume: bool | None = None,
) -> Iterator[RunSession]:
    """Open the run directory and everything in it; close it well or, with the failure recorded everywhere, not well.

    The trainer and the model name a run directory that the configuration does not name. `observers` are registered in addition to those of the
    configuration; `resume` overrides `checkpoint.resume`. Raises ConfigError for a directory that must not be used, CheckpointError for a
    checkpoint that cannot be resumed from. What the body raises is logged with its traceback, sent to observers as one line, and raised again;
    a run that is refused (EngineError) before its start was recorded leaves no directory behind.
    """
    config = resolved.config
    resumes = config.checkpoint.resume if resume is None else resume
    began = False
    directory = open_run_directory(config.run.directory, name=f"{config.trainer}-{Path(config.model.path).name}", resume=resumes)
    try:
        with directory.lock(), logging_to(directory.log):
            session: RunSession | None = None
            try:
                with listen_for_stop() as stop:
                    session = _open(resolved, directory, observers, stop, resumes=resumes)
                    yield session
            except BaseException as error:
                line = error.summary if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                logger.exception("the session failed: %s", line)
                if session is not None:
                    began = session.began
                    _finish_despite(session, line)
                raise
            else:
                began = session.began
                session._finish(None)  # noqa: SLF001 - this function and the class are two halves of one thing
                logger.info("the session ended at step %d", session.step)
    except EngineError:
        if not began:
            directory.remove_traces()
        raise


def record_failure(path: Path, error: EngineError) -> None:
    """Record the failure of the session of a run directory whose process ended without a word, as a session does itself."""
    directory = RunDirectory(path)
    with logging_to(directory.log):
        logger.error("the session failed: %s", error.summary)
    manifest = read_manifest(directory.manifest)
    if manifest is not None and manifest["sessions"]:
        steps = [record["step"] for record in read_metrics(directory.metrics) if record["kind"] == "step"]
        end_session(manifest, step=steps[-1] if steps else manifest["sessions"][-1]["start_step"], error=error.summary)
        write_manifest(directory.manifest, manifest)


def to_resume_from(resolved: ResolvedConfig) -> Checkpoint | None:
    """Return the checkpoint that a session would go on from, held against the configuration as a session does; it writes nothing.

    Raises CheckpointError or PluginError for one that cannot be resumed from.
    """
    return _check_checkpoint(_find_latest(resolved), resolved)[0]


def recall_choices(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration of a run that goes on, with what was chosen at its start for keys that say "auto"; else as it is.

    Raises CheckpointError for a checkpoint whose configuration cannot be read, and PluginError for a collator that is not there.
    """
    checkpoint = _find_latest(resolved)
    return resolved if checkpoint is None else with_recorded_choices(resolved, checkpoint.document(CONFIG_DOCUMENT))


def _find_latest(resolved: ResolvedConfig) -> Checkpoint | None:
    config = resolved.config
    if not config.checkpoint.resume or config.run.directory is None:
        return None
    directory = RunDirectory(Path(config.run.directory).expanduser())
    return CheckpointStore(directory.checkpoints).latest() if directory.checkpoints.is_dir() else None


def _check_checkpoint(checkpoint: Checkpoint | None, resolved: ResolvedConfig) -> tuple[Checkpoint | None, list[str]]:
    """Return a checkpoint that may be resumed from, and what differs from its configuration, in sentences."""
    if checkpoint is None:
        return None, []
    try:
        checkpoint.verify()
    except CheckpointError as error:
        raise _with_older_rule(error, checkpoint) from error
    try:
        return checkpoint, _compare(checkpoint, resolved)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise checkpoint.damage_error(f"its documents are not as they were written ({type(error).__name__}: {error})") from error


def _with_older_rule(error: CheckpointError, checkpoint: Checkpoint) -> CheckpointError:
    """Return the refusal of a checkpoint, with the key that says how its rows were read where its configuration does not know the key."""
    try:
        data = checkpoint.document(CONFIG_DOCUMENT).get("data")
    except CheckpointError:
        return error
    if not has_older_rule(data):
        return error
    return CheckpointError(error.cause, remedy=error.remedy, details=[*error.details, OLDER_RULE])


def _open(
    resolved: ResolvedConfig, directory: RunDirectory, observers: Sequence[object], stop: StopRequest, *, resumes: bool
) -> RunSession:
    config = resolved.config
    key = _user_key()
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep)
    store.remove_left_overs()
    mirror = None
    if (address := config.checkpoint.store) is not None:
        mirror = Mirror.open(address, directory, resumes=resumes, asynchronous=config.checkpoint.asynchronous)
    checkpoint = store.latest() if resumes else None
    if checkpoint is not None:
        resolved = with_recorded_choices(resolved, checkpoint.document(CONFIG_DOCUMENT))
    checkpoint, changed = _check_checkpoint(checkpoint, resolved)
    if checkpoint is not None:
        logger.info("resuming from %s", checkpoint.path)
    context = FactoryContext(seed=config.run.seed)
    bus = ObserverBus()
    for selected in resolved.observers:
        bus.register(selected.make(context), name=str(selected.loaded.record), on_error=selected.on_error)
    for observer in observers:
        bus.register(observer)
    report = ReportWriter.of(directory.path, wanted=config.run.report)
    manifest = read_manifest(directory.manifest) if directory.manifest.exists() else None
    if manifest is None and checkpoint is not None:
        logger.warning("%s is missing or damaged; it is written anew, without the sessions before this one", directory.manifest)
    return RunSession(
        directory,
        store,
        stop,
        checkpoint,
        changed,
        resolved,
        bus,
        report,
        key,
        manifest,
        checkpoint.step if checkpoint else 0,
        mirror,
    )


def _user_key() -> bytes | None:
    """Return the user's key; None, with a warning, where none can be kept. Raises EngineError for one that must not be used."""
    try:
        return make_key()
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so that this run is not known to be yours later: resuming or evaluating it asks before it runs code "
            "outside of the engine; set %s to a file that can be written",
            key_file(),
            error.strerror,
            VARIABLE,
        )
        return None


def _lock_plugins(resolved: ResolvedConfig) -> dict[str, dict[str, Any]]:
    """Return the lock entries of all plugins by their place, and of the trainer where another distribution has it."""
    entries = {place: selected.to_lock_entry() for place, selected in resolved.plugins.items()}
    trainer = find_trainer_record(resolved.config.trainer)
    return entries if trainer is None else {**entries, TRAINER: {"record": trainer.to_lock_entry(), "options": {}}}


def _compare(checkpoint: Checkpoint, resolved: ResolvedConfig) -> list[str]:
    """Refuse another trainer and other plugins; warn of other configuration. Returns what differs, in sentences."""
    config, present = checkpoint.document(CONFIG_DOCUMENT), resolved.as_dict()
    # first, because trainers differ in their plugins, which may be allowed to change
    refuse_other_trainer(config, present)
    before = checkpoint.document(PLUGINS_DOCUMENT)
    allowed = refuse_changed_plugins(before, _lock_plugins(resolved), allow_changed=resolved.config.checkpoint.allow_changed)
    refuse_other_base(config["model"], checkpoint.document(BASE_DOCUMENT), base_of(resolved.config.model))
    changes = [str(change) for change in find_changed_keys(config, present)]
    for change in [*allowed, *changes]:
        logger.warning("differs from the checkpoint, so the run no longer equals an uninterrupted one: %s", change)
    return [*allowed, *changes]


def _finish_despite(session: RunSession, error: str) -> None:
    """Report a failure without letting trouble in reporting, such as a full disk, take its place."""
    try:
        session._finish(error)  # noqa: SLF001 - see open_session
    except Exception:  # the failure that is being reported goes on to the caller, and this one to the log
        logger.exception("the failure could not be reported everywhere")
