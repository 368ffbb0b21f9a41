"""Deletion of a run's checkpoints by rules. The one to resume from and the best one always stay; the former is proven whole before any goes."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import field, frozen

from skyrl_engine.errors import CheckpointError, ConfigError, EngineError, Problem
from skyrl_engine.run.best import rank_checkpoints, read_metric
from skyrl_engine.run.checkpoint import Checkpoint, CheckpointStore, remove_aside
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.lock import look_at_lock
from skyrl_engine.run.metrics import read_evaluations
from skyrl_engine.run.summary import read_config, read_state
from skyrl_engine.workers.listing import count_bytes

_TRAINER_DOCUMENT = "trainer.json"
_BEST_DOCUMENT = "best.json"
_REFERENCE = re.compile(r"step-(\d+)")
"""The name of a copy of the trained model that became the reference."""


@frozen
class PruneRules:
    """Which checkpoints stay: the `keep_last` newest, the `keep_best` best by `metric`, and those younger than `older_than` seconds.

    `metric` None: the one by which evaluations are compared; `higher` says which of its values are better, None: as its name says.
    """

    keep_last: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    higher: bool | None = None
    older_than: float | None = None

    @property
    def keeps_all(self) -> bool:
        """True where no rule says which checkpoints go."""
        return self.keep_last is None and self.keep_best is None and self.older_than is None


@frozen
class PrunePlan:
    """The checkpoints of a run that go, and those that stay with the reason for each, by step.

    With them go `references`, copies of the reference that none of those that stay names, and `left_overs`, the remains of a crash.
    """

    directory: RunDirectory
    go: tuple[Checkpoint, ...] = ()
    stay: Mapping[int, str] = field(factory=dict)
    references: tuple[Path, ...] = ()
    left_overs: tuple[Path, ...] = ()

    def list_paths(self) -> list[Path]:
        """Return the folders and files that go."""
        return [*self.left_overs, *(checkpoint.path for checkpoint in self.go), *self.references]


@contextmanager
def hold_to_prune(directory: RunDirectory) -> Iterator[None]:
    """Hold a run directory, so that no session begins while it is pruned. Raises as `refuse_live`."""
    refuse_live(directory)
    with directory.lock("prune"):
        yield


def refuse_live(directory: RunDirectory) -> None:
    """Raise EngineError where a process works on a run, or may do so."""
    state, lock = read_state(directory), look_at_lock(directory.lock_file)
    ended = state.word in ("ended", "stopped", "failed") and lock.holder is None
    if lock.status == "held" or state.is_live:
        raise EngineError(f"{directory.path} is not pruned, for a process works on it", remedy="Stop it, or wait for its end")
    if lock.status == "unknown" and not ended:
        raise EngineError(
            f"{directory.path} is not pruned, for nobody here can say if a process works on it ({lock.holder or 'of another host'})",
            remedy=f"Prune it on that host, or delete {directory.lock_file} if you know that the process has ended",
        )


def plan_prune(directory: RunDirectory, rules: PruneRules) -> PrunePlan:
    """Say what goes by the rules; it deletes nothing. Raises ConfigError for a metric that the run does not have, or whose name does not tell.

    Later checkpoints than the one to resume from, of a continuation that was given up, are none of the newest.
    """
    store = CheckpointStore(directory.checkpoints)
    saved, latest = store.all(), store.latest()
    if latest is None:
        return PrunePlan(directory)
    newest = [checkpoint.step for checkpoint in reversed(saved) if checkpoint.step <= latest.step]
    ranked = _rank(directory, [checkpoint.step for checkpoint in saved], rules)
    oldest_time = None if rules.older_than is None else time.time() - rules.older_than
    reasons = {latest.step: "the one to resume from"}
    for step in newest[: rules.keep_last or 0]:
        reasons.setdefault(step, f"one of the last {rules.keep_last}")
    for place, step in enumerate(ranked[: rules.keep_best or 1]):
        reason = "the best" if place == 0 else f"one of the best {rules.keep_best}"
        reasons[step] = f"{reasons[step]}, {reason}" if step in reasons else reason
    for checkpoint in saved:
        if oldest_time is not None and _written(checkpoint) > oldest_time:
            reasons.setdefault(checkpoint.step, "young")
    for checkpoint in [checkpoint for checkpoint in saved if checkpoint.step in reasons]:
        best_step = _read_best_step(checkpoint)
        if best_step is not None and any(other.step == best_step for other in saved):
            reasons.setdefault(best_step, f"the best for step {checkpoint.step}")
    go = tuple(checkpoint for checkpoint in saved if checkpoint.step not in reasons)
    stay = [checkpoint for checkpoint in saved if checkpoint.step in reasons]
    half_deleted = directory.reference.glob(".step-*.replaced")
    return PrunePlan(
        directory, go, reasons, tuple(_list_unused_references(directory, stay)), (*store.list_left_overs(), *half_deleted)
    )


def _rank(directory: RunDirectory, saved: Sequence[int], rules: PruneRules) -> Sequence[int]:
    """Return the steps of checkpoints that were evaluated, the best first. Raises ConfigError where nothing tells and a rule asks for it."""
    evaluations = read_evaluations(directory.metrics)
    metric, higher = read_metric(read_config(directory))
    is_asked = rules.metric is not None or rules.higher is not None
    if is_asked:
        metric, higher = rules.metric or metric, rules.higher
    # a run may end before the first evaluation with the metric that its configuration names
    is_there = metric is None or any(metric in metrics for metrics in evaluations.values())
    ranked = rank_checkpoints(saved, evaluations, metric, higher=higher) if is_asked or is_there else ()
    if not ranked and rules.keep_best is not None:
        cause = "no checkpoint of the run was evaluated, so that none is known to be the best"
        raise ConfigError([Problem("--keep-best", f"{directory.path}: {cause}", "Choose what stays with --keep-last")])
    return ranked


def _read_best_step(checkpoint: Checkpoint) -> int | None:
    """Return the step of the checkpoint without which a session does not go on from this one, because it looks for a better one."""
    path = checkpoint.path / _BEST_DOCUMENT
    step = checkpoint.document(_BEST_DOCUMENT).get("step") if path.exists() else None
    return step if isinstance(step, int) else None


def _written(checkpoint: Checkpoint) -> float:
    return max(path.stat().st_mtime for path in (checkpoint.path, *checkpoint.path.glob("*.json")))


def _list_unused_references(directory: RunDirectory, stay: list[Checkpoint]) -> Iterator[Path]:
    """Yield the copies of the trained model that no checkpoint that stays names as its reference."""
    if not directory.reference.is_dir():
        return
    named = {checkpoint.document(_TRAINER_DOCUMENT).get("reference") for checkpoint in stay}
    for path in sorted(directory.reference.iterdir()):
        if _REFERENCE.fullmatch(path.name) and path.name not in named:
            yield path


def prune(plan: PrunePlan) -> int:
    """Delete what a plan says, the oldest checkpoint first; the run must be held. Returns freed bytes.

    The checkpoint to resume from is compared with its listing before anything goes. Raises CheckpointError where it is damaged, is another
    than when the plan was made, or something cannot be deleted; what was not deleted by then is whole.
    """
    directory = plan.directory
    latest = CheckpointStore(directory.checkpoints).latest()
    if latest is None or not plan.list_paths():
        return 0
    if latest.step not in plan.stay:
        raise CheckpointError(f"{directory.path} has other checkpoints than a moment ago", remedy="Prune it again")
    latest.verify()
    freed = 0
    for path in plan.list_paths():
        try:
            size = path.lstat().st_size if path.is_symlink() else count_bytes(path)
            remove_aside(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be deleted ({error.strerror or error})", remedy="Make it writable, and prune again"
            ) from error
        freed += size
    return freed
