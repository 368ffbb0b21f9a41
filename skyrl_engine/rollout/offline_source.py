"""Rollouts that were recorded before, in the place of sampling: checked as a whole, then given to a trainer step by step."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from attrs import define, evolve, field, frozen

from skyrl_engine.contracts.kinds.group_filter import GroupFilter
from skyrl_engine.contracts.values import rollout_columns
from skyrl_engine.contracts.values.rollout import LARGEST_REWARD, SEGMENT_PROMPT, Group, Trajectory
from skyrl_engine.errors import DataError, RolloutError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.rollout.arrow_codec import LearnedAttempt
from skyrl_engine.rollout.columns import list_common_columns
from skyrl_engine.rollout.exported import journal_of, read_rollouts
from skyrl_engine.rollout.group_source import Result, StepBatch, Valued, drop_reason
from skyrl_engine.rollout.journal_index import read_index

logger = logging.getLogger(__name__)

FAILED: Final = "failed"
"""The reason for which a group is left out of which too few attempts ended well."""

_TOLD_EVERY: Final = 256

_ROUNDING: Final = 1e-3
"""Largest log-probability that is taken, in nats: other programs round above 0."""

OnProgress = Callable[[int], None]
"""Told how many groups were read."""


@frozen
class RecordingLimits:
    """Conditions that recorded attempts must meet.

    `vocabulary` counts the model's tokens and `positions` those of a sequence (None: unknown), `fewest_finished` says how many attempts of a
    group of so many must not have failed.
    """

    vocabulary: int | None
    positions: int | None
    fewest_finished: Callable[[int], int]


@frozen(eq=False)
class Recording:
    """The groups of a recording that are trained on, each read again when its turn comes, and counts of what it holds.

    `names` are those of its environments, `left_out` counts groups by the reason for which they are not trained on, `attempts` and `tokens`
    (sampled ones) are of the others, `largest` is the most attempts of a group, `longest` the most tokens of a stretch of one, and
    `rewritten` says that some attempt has several stretches. `has_logprobs` is False where the program that wrote the file did not keep the
    sampler's log-probabilities, and `has_stops` False where it did not say of every attempt what ended its turns. `columns` are the further
    columns that every attempt has, by their names in `SampleColumns`. `digest` is a hash of all that training reads.
    """

    place: Path
    groups: Sequence[Callable[[], Group]]
    names: tuple[str, ...]
    left_out: Mapping[str, int]
    attempts: int
    tokens: int
    largest: int
    longest: int
    rewritten: bool
    has_logprobs: bool
    has_stops: bool
    columns: frozenset[str]
    digest: str

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{self.place}: {len(self.groups):,} groups of {self.attempts:,} attempts, {self.tokens:,} sampled tokens" + (
            f"; left out: {reasons}" if reasons else ""
        )


def read_recording(
    place: Path,
    limits: RecordingLimits,
    filters: Sequence[BoundPlugin[GroupFilter]] = (),
    *,
    max_drop_share: float = 1.0,
    on_starved: Literal["train", "stop"] = "train",
    on_progress: OnProgress | None = None,
) -> Recording:
    """Read and check all groups once. Filters decide again; what they decided when the groups were sampled does not count.

    Raises RolloutError for a place without rollouts, and where filters drop more than `max_drop_share` and `on_starved` is "stop"; DataError
    for an attempt that cannot be trained on.
    """
    groups: list[tuple[Callable[[], Group], str | None]] = []
    names: dict[str, None] = {}
    left_out: Counter[str] = Counter()
    attempts: list[int] = []
    tokens: list[int] = []
    longest: list[int] = []
    rewritten: list[bool] = []
    without_logprobs = without_stops = 0
    columns = {row.column for row in rollout_columns.list_further_columns()}
    digest = hashlib.sha256()
    for number, read in enumerate(_readers(place)):
        group = read()
        if on_progress is not None and number % _TOLD_EVERY == 0:
            on_progress(number)
        for attempt in group.finished:
            _check(attempt, f"{place}: attempt {attempt.member} of group {group.ticket}", limits)
        if len(group.finished) < limits.fewest_finished(max(1, len(group.trajectories))):
            left_out[FAILED] += 1
            continue
        names.setdefault(group.environment)
        reason = drop_reason(group, filters)
        groups.append((read, reason))
        attempts.append(len(group.finished))
        tokens.append(sum(len(attempt.logprobs) for attempt in group.finished))
        longest.append(max((_longest_stretch(attempt) for attempt in group.finished), default=0))
        rewritten.append(any((attempt.kinds == SEGMENT_PROMPT).sum() > 1 for attempt in group.finished))
        without_logprobs += any(np.isnan(attempt.logprobs).any() for attempt in group.finished)
        without_stops += any(not attempt.stops for attempt in group.finished)
        columns &= {row.column for row in list_common_columns(group.finished)}
        _update(digest, group)
    dropped = Counter(reason for _, reason in groups if reason is not None)
    if groups and dropped.total() / len(groups) > max_drop_share:
        share = f"group filters drop {dropped.total():,} of the {len(groups):,} groups of {place}"
        if on_starved == "stop":
            raise RolloutError(share, remedy="Remove a filter, or raise rollouts.max_drop_share")
        logger.warning('%s, more than rollouts.max_drop_share: they are trained on, as rollouts.on_starved = "train" says', share)
        dropped.clear()
    chosen = [place for place, (_, reason) in enumerate(groups) if not dropped or reason is None]
    if not chosen:
        raise RolloutError(
            f"{place} holds no group to train on: "
            + (", ".join(f"{count:,} {reason}" for reason, count in (left_out + dropped).items()) or "it is empty"),
            remedy="Name another recording, remove a filter, or lower rollouts.min_group_size",
        )
    return Recording(
        place,
        [groups[place][0] for place in chosen],
        tuple(names),
        left_out + dropped,
        sum(attempts[place] for place in chosen),
        sum(tokens[place] for place in chosen),
        max(attempts[place] for place in chosen),
        max(longest[place] for place in chosen),
        any(rewritten[place] for place in chosen),
        without_logprobs == 0,
        without_stops == 0,
        frozenset(columns),
        digest.hexdigest()[:16],
    )


def _longest_stretch(attempt: Trajectory) -> int:
    """Count the tokens of the longest stretch: from a prompt to the next one, or to the end."""
    starts = attempt.segment_offsets[:-1][attempt.kinds == SEGMENT_PROMPT]
    return int(np.diff([*starts, len(attempt.token_ids)]).max(initial=0))


@define(eq=False)
class OfflineSource:
    """Gives a trainer the groups of a recording: in their order, and in another one, a function of `seed`, in every later pass over them.

    `valued` adds a model's part to the rewards of a step's groups again.

    Rollouts of another policy have no staleness that could be counted in steps of this run: every group starts at the weights that it trains.
    """

    recording: Recording
    per_step: int
    seed: int
    step: int = 0
    valued: Valued | None = None
    _order: tuple[int, np.ndarray] | None = field(default=None, init=False)

    def take(self, step: int) -> StepBatch:
        """Return the groups of a step, counted from 1."""
        first = (step - 1) * self.per_step
        groups = tuple(self._group(ticket, step - 1) for ticket in range(first, first + self.per_step))
        if self.valued is not None:
            groups = tuple(self.valued(groups))
        return StepBatch(groups, groups)

    def finish_step(self, step: int, groups: Sequence[Group], learned: Sequence[LearnedAttempt]) -> None:  # noqa: ARG002 -- it follows from the step
        """Take the end of a step."""
        self.step = step

    def publish(self, version: int) -> None:
        """Take it that there are new weights; nothing is sampled from them."""

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps."""
        return {"step": self.step}

    def at_rest(self, work: Callable[[], Result]) -> Result:
        """Do something now: nothing is sampled."""
        return work()

    def _group(self, ticket: int, version: int) -> Group:
        turn, place = divmod(ticket, len(self.recording.groups))
        if turn:
            if self._order is None or self._order[0] != turn:
                generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, turn])))
                self._order = turn, generator.permutation(len(self.recording.groups))
            place = int(self._order[1][place])
        return evolve(self.recording.groups[place](), ticket=ticket, start_version=version, dropped=None)


def _readers(place: Path) -> Iterator[Callable[[], Group]]:
    """Yield a function for every group: those of a journal read it where it is, those of a file hold it."""
    folder = journal_of(place)
    index = None if folder is None else read_index(folder)
    for loss in () if index is None else index.losses:
        logger.warning("the rollouts of %s are not all there: %s", place, loss)
    if index is not None and index.groups:
        for ticket in sorted(index.groups):
            yield index.groups[ticket].group
        return
    # raises for a folder without groups
    for group in read_rollouts(place):
        yield partial(_itself, group)


def _itself(group: Group) -> Group:
    return group


def _check(attempt: Trajectory, name: str, limits: RecordingLimits) -> None:
    largest = int(attempt.token_ids.max(initial=0))
    if limits.vocabulary is not None and largest >= limits.vocabulary:
        raise DataError(
            f"{name} holds token id {largest}, and the model's vocabulary has {limits.vocabulary}",
            remedy="Train the model that the rollouts were sampled from, or one with its tokenizer",
        )
    if int(attempt.token_ids.min(initial=0)) < 0:
        raise DataError(f"{name} holds a negative token id", remedy="Write the rollouts again")
    starts = attempt.segment_offsets[:-1][attempt.kinds == SEGMENT_PROMPT]
    longest = int(np.diff([*starts.tolist(), len(attempt.token_ids)]).max(initial=0))
    if limits.positions is not None and longest > limits.positions:
        raise DataError(
            f"{name} has {longest:,} tokens, and the model has {limits.positions:,} positions",
            remedy="Train the model that the rollouts were sampled from, or remove the attempt",
        )
    if not (np.abs(attempt.rewards) <= LARGEST_REWARD).all() or not abs(attempt.unplaced_reward) <= LARGEST_REWARD:
        raise DataError(f"{name} has a reward that is not finite in float32", remedy="Correct or remove the attempt")
    lengths = np.diff(attempt.segment_offsets)
    if (lengths[attempt.kinds == SEGMENT_PROMPT] == 0).any():
        raise DataError(
            f"{name} has no prompt: nothing gives its first token a probability", remedy="Store the prompt, or remove it"
        )
    if not len(attempt.logprobs):
        raise DataError(f"{name} has no sampled token, and so nothing to learn from", remedy="Remove the attempt")
    for row in rollout_columns.list_further_columns():
        values = attempt.per_token(row)
        if values is not None and not (np.abs(values) <= row.largest).all():
            raise DataError(f"{name} has a number that is not finite in {row.name}", remedy="Correct or remove the attempt")
    unknown = np.isnan(attempt.logprobs)
    if (unknown.any() and not unknown.all()) or np.isinf(attempt.logprobs).any():
        raise DataError(f"{name} has log-probabilities that are not finite", remedy="Correct or remove the attempt")
    if (attempt.logprobs > _ROUNDING).any():
        raise DataError(
            f"{name} has the log-probability {attempt.logprobs.max():g}, and none is above 0",
            remedy="Store natural logarithms of probabilities",
        )


def _update(digest: Any, group: Group) -> None:
    digest.update(f"{group.environment} {group.task_key} {len(group.trajectories)}".encode())
    for trajectory in group.trajectories:
        digest.update(f"{trajectory.member} {trajectory.status} {trajectory.stops[-1:]} {trajectory.unplaced_reward!r}".encode())
        of_table = (trajectory.per_token(row) for row in rollout_columns.ROLLOUT_COLUMNS)
        present = (values for values in of_table if values is not None)
        for values in (trajectory.token_ids, trajectory.kinds, np.asarray(trajectory.segment_offsets), *present):
            digest.update(np.ascontiguousarray(values).tobytes())
