"""Check a journal of rollouts: can all of it be read, and was every group trained on at most once."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values import rollout_columns
from skyrl_engine.contracts.values.rollout import Group, Trajectory
from skyrl_engine.errors import CheckpointError, RolloutError
from skyrl_engine.rollout.journal_index import JournalIndex, Listing, read_index
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.session import TRAINER_DOCUMENT


@frozen
class CheckReport:
    """The journal in numbers, what is wrong with it, and what is worth a word and no mistake."""

    groups: int
    attempts: int
    steps: int
    wrong: tuple[str, ...]
    notes: tuple[str, ...]


def check_journal(folder: Path, listed: Listing | None = None) -> CheckReport:
    """Read every record of the journal in `folder`, and compare what was trained with what was recorded; `listed` as in `read_index`."""
    index = read_index(folder, listed)
    torn = [] if index.torn is None else [f"{index.torn}; the next session cuts that off"]
    attempts = 0
    whole = not index.segments or index.segments[0].number == 1
    wrong = [*index.losses, *_of_runs(index), *_of_steps(index, whole=whole)]
    for ticket in sorted(index.groups):
        try:
            group = index.groups[ticket].group()
        except RolloutError as error:
            wrong.append(error.cause)
            continue
        attempts += len(group.trajectories)
        wrong += [f"group {ticket}: {cause}" for cause in _of_group(group)]
    return CheckReport(len(index.groups), attempts, len(index.trained), tuple(wrong), tuple(torn))


def read_listing(run: RunDirectory) -> Listing | None:
    """Return the segments that the latest checkpoint of a run counts on; None where no checkpoint says."""
    checkpoint = CheckpointStore(run.checkpoints).latest()
    try:
        segments = None if checkpoint is None else checkpoint.document(TRAINER_DOCUMENT).get("segments")
        return None if segments is None else {str(name): int(size) for name, size in segments.items()}
    except (CheckpointError, AttributeError, TypeError, ValueError):  # a resume says what is wrong with the checkpoint
        return None


def _of_runs(index: JournalIndex) -> Iterator[str]:
    runs = {segment.run for segment in index.segments if segment.run is not None}
    if len(runs) > 1:
        yield f"segments are of several runs: {', '.join(sorted(runs))}"


def _of_steps(index: JournalIndex, *, whole: bool) -> Iterator[str]:
    """Compare steps with groups; of the oldest steps records may be gone where the journal is not `whole`."""
    times = Counter(ticket for tickets in index.trained.values() for ticket in tickets)
    repeated: dict[int, dict[int, None]] = {ticket: {} for ticket, count in times.items() if count > 1}
    for step, tickets in index.trained.items():
        for ticket in tickets:
            if ticket in repeated:
                repeated[ticket].setdefault(step)
    for ticket, in_steps in repeated.items():
        yield f"group {ticket} was trained on {times[ticket]} times, in the steps {', '.join(map(str, in_steps))}"
    steps = sorted(index.trained)
    for before, after in pairwise(steps):
        if after != before + 1:
            yield f"no record says what the steps {before + 1} to {after - 1} trained on"
    if whole and steps and steps[0] != 1:
        yield f"no record says what the steps 1 to {steps[0] - 1} trained on"
    for step, tickets in sorted(index.trained.items()):
        for ticket in tickets:
            entry = index.groups.get(ticket)
            if entry is None:
                if whole:
                    yield f"step {step} trained on group {ticket}, of which there is no record"
            elif entry.failed:
                yield f"step {step} trained on group {ticket}, of which too many attempts failed"
            elif entry.newest_version >= step:
                yield f"step {step} trained on group {ticket}, which version {entry.newest_version} sampled"


def _of_group(group: Group) -> Iterator[str]:
    for trajectory in group.trajectories:
        sampled = int(trajectory.sampled.sum()) if len(trajectory.kinds) else 0
        name = f"attempt {trajectory.member}"
        if trajectory.segment_offsets[-1] != len(trajectory.token_ids) or (np.diff(trajectory.segment_offsets) < 0).any():
            yield f"{name} has {len(trajectory.token_ids)} tokens, and segments up to {trajectory.segment_offsets[-1]}"
        elif uneven := {row: count for row, count in _count_numbers(trajectory).items() if count != sampled}:
            yield f"{name} has {sampled} sampled tokens, and {', '.join(f'{count} {row}' for row, count in uneven.items())}"
        elif (np.diff(trajectory.versions.versions) < 0).any():
            yield f"{name} was sampled by weights that get older"


def _count_numbers(attempt: Trajectory) -> dict[str, int]:
    """Count the numbers of every rollout column that the attempt has."""
    present = {row.name: attempt.per_token(row) for row in rollout_columns.ROLLOUT_COLUMNS}
    return {name: len(values) for name, values in present.items() if values is not None}
