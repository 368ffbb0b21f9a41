"""Check a journal of rollouts: can all of it be read, and was every group trained on at most once."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.journal_index import JournalIndex, read_index, run_of


@frozen
class Checked:
    """The journal in numbers, what is wrong with it, and what is worth a word and no mistake."""

    groups: int
    attempts: int
    steps: int
    wrong: tuple[str, ...]
    notes: tuple[str, ...]


def check_journal(folder: Path) -> Checked:
    """Read every record of the journal in `folder`, and compare what was trained with what was recorded."""
    index = read_index(folder)
    segments = sorted(index.ends)
    damages = [str(each) for each in index.damages if each.segment != segments[-1]]
    torn = [f"{each}; the next session cuts that off" for each in index.damages if each.segment == segments[-1]]
    attempts = 0
    wrong = [*damages, *_of_segments(segments), *_of_steps(index, whole=not segments or _number(segments[0]) == 1)]
    for ticket, entry in sorted(index.groups.items()):
        try:
            group = entry.group()
        except RolloutError as error:
            wrong.append(error.cause)
            continue
        attempts += len(group.trajectories)
        wrong += [f"group {ticket}: {each}" for each in _of_group(group)]
    return Checked(len(index.groups), attempts, len(index.trained), tuple(wrong), tuple(torn))


def _number(segment: Path) -> int:
    return int(re.sub(r"\D", "", segment.stem))


def _of_segments(segments: list[Path]) -> Iterator[str]:
    numbers = [_number(each) for each in segments]
    missing = sorted(set(range(min(numbers, default=0), max(numbers, default=0))) - set(numbers))
    if missing:
        yield f"segments are missing in between: {', '.join(map(str, missing))}"
    runs = {run for each in segments if (run := run_of(each)) is not None}
    if len(runs) > 1:
        yield f"segments are of several runs: {', '.join(sorted(runs))}"


def _of_steps(index: JournalIndex, *, whole: bool) -> Iterator[str]:
    """Compare steps with groups; of the oldest steps records may be gone where the journal is not `whole`."""
    times = Counter(ticket for tickets in index.trained.values() for ticket in tickets)
    for ticket, count in times.items():
        if count > 1:
            steps = [step for step, tickets in index.trained.items() if ticket in tickets]
            yield f"group {ticket} was trained on {count} times, in the steps {', '.join(map(str, steps))}"
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
            elif entry.header["failed"]:
                yield f"step {step} trained on group {ticket}, of which too many attempts failed"
            elif entry.header["newest_version"] >= step:
                yield f"step {step} trained on group {ticket}, which version {entry.header['newest_version']} sampled"


def _of_group(group: Group) -> Iterator[str]:
    for each in group.trajectories:
        sampled = int(each.sampled.sum()) if len(each.kinds) else 0
        name = f"attempt {each.member}"
        if each.segment_offsets[-1] != len(each.token_ids) or (np.diff(each.segment_offsets) < 0).any():
            yield f"{name} has {len(each.token_ids)} tokens, and segments up to {each.segment_offsets[-1]}"
        elif not len(each.logprobs) == len(each.rewards) == sampled:
            yield f"{name} has {sampled} sampled tokens, {len(each.logprobs)} log-probabilities and {len(each.rewards)} rewards"
        elif (np.diff(each.versions.versions) < 0).any():
            yield f"{name} was sampled by weights that get older"
