"""Deletion of old rollouts of a run that has ended, as the run itself deletes them: whole segments, the oldest first."""

from pathlib import Path

from attrs import frozen

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.checking import read_listing
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import Listing, read_index
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory


@frozen
class RolloutPlan:
    """The segments of a journal that go: those with nothing of the last `keep` steps before `step`, that of the checkpoint to resume from.

    `run` is the text by which the journal knows its run, and `listed` what the checkpoint counts on.
    """

    directory: RunDirectory
    keep: int
    step: int
    run: str
    segments: tuple[Path, ...]
    listed: Listing | None


def plan_to_prune_rollouts(directory: RunDirectory, keep: int) -> RolloutPlan | None:
    """Say which segments go if the rollouts of `keep` steps stay; None where none do. It deletes nothing.

    Raises RolloutError for a journal that is damaged, or that holds steps after the checkpoint to resume from: they would no longer count.
    """
    latest = CheckpointStore(directory.checkpoints).latest()
    listed = read_listing(directory)
    index = read_index(directory.rollouts, listed)
    expired = []
    for segment in index.segments:
        if latest is None or index.ends[segment.path] > latest.step - keep:
            break
        expired.append(segment.path)
    if latest is None or not expired:
        return None
    if index.losses or index.torn is not None:
        cause = f"the rollouts of {directory.path} are not pruned, for they are damaged: {'; '.join(index.losses) or index.torn}"
        raise RolloutError(cause, remedy="Resume the run, which mends them, or leave out --keep-rollouts")
    newest = max(index.trained, default=0)
    if newest > latest.step:
        raise RolloutError(
            f"the rollouts of {directory.path} are not pruned, for its last checkpoint is of step {latest.step}, and step {newest} was trained",
            remedy="Resume the run and let it end, or leave out --keep-rollouts",
        )
    run = next(segment.run for segment in reversed(index.segments) if segment.run is not None)
    return RolloutPlan(directory, keep, latest.step, run, tuple(expired), listed)


def prune_rollouts(plan: RolloutPlan) -> int:
    """Delete the segments of a plan; the run must be held. Returns freed bytes.

    A new segment says first that they have expired, so that nobody takes them for lost, whenever this is interrupted. Raises CheckpointError
    where the checkpoint to resume from is damaged, and RolloutError where the journal cannot be written.
    """
    latest = CheckpointStore(plan.directory.checkpoints).at(plan.step)
    latest.verify()
    sizes = {path: path.stat().st_size for path in plan.segments}
    with open_journal(plan.directory.rollouts, run=plan.run, keep=plan.keep, resumed=plan.step, listed=plan.listed) as journal:
        journal.delete_expired()
    return sum(size for path, size in sizes.items() if not path.exists())
