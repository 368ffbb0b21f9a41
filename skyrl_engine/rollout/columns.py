"""Trajectories as columns, with array operations alone. A stretch becomes one sample; every sampled token is scored in exactly one."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.values import rollout_columns
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import IntArray, offsets_of
from skyrl_engine.contracts.values.rollout import SEGMENT_PROMPT, SEGMENT_SAMPLED, Group, Trajectory
from skyrl_engine.contracts.values.rollout_columns import ROLLOUT_STALENESS, RolloutColumn
from skyrl_engine.rollout.arrow_codec import LearnedAttempt

Truncated = Literal["keep", "mask", "zero_reward"]


@frozen
class Overlong:
    """A soft punishment of length (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13).

    Up to `start` sampled and observed tokens nothing is taken off the reward, from there on evenly more, up to `penalty` at `end`.
    """

    start: float
    end: int
    penalty: float

    def compute_penalties(self, lengths: IntArray) -> npt.NDArray[np.float64]:
        """float64 of the shape of `lengths`: what attempts of these lengths lose."""
        shares: npt.NDArray[np.float64] = np.clip((lengths - self.start) / (self.end - self.start), 0.0, 1.0)
        return shares * self.penalty


def length_penalties(attempts: Sequence[Trajectory], overlong: Overlong) -> npt.NDArray[np.float64]:
    """float64[N]: what attempts lose for their length, of sampled and observed tokens."""
    prompts = [int(np.diff(attempt.segment_offsets)[attempt.kinds == SEGMENT_PROMPT].sum()) for attempt in attempts]
    lengths = np.array([len(attempt.token_ids) for attempt in attempts], dtype=np.int64) - np.array(prompts, dtype=np.int64)
    return overlong.compute_penalties(lengths)


def missing_eos_penalties(attempts: Sequence[Trajectory], penalty: float) -> npt.NDArray[np.float64]:
    """float64[N]: what attempts lose because the model did not end them itself, each `penalty` or 0."""
    return penalty * np.array([attempt.misses_end for attempt in attempts], dtype=np.float64)


def to_columns(
    groups: Sequence[Group],
    *,
    environments: Sequence[str],
    version: int = 0,
    truncated: Truncated = "keep",
    overlong: Overlong | None = None,
    missing_eos_penalty: float | None = None,
    versions: bool = False,
) -> SampleColumns:
    """Lay out the attempts of groups that did not fail, in the order of groups and members; `version` is that of the weights to be trained.

    A stretch becomes a sample; one in which nothing was sampled is left out. The action axis of a sample is everything after its prompt; the
    loss weight is 1 on sampled tokens and 0 on observed ones. Columns are those of the table `rollout_columns.ROLLOUT_COLUMNS` that every
    attempt has, 0 where nothing was sampled: `rewards` in float64, `rollout_logprobs`, and what environments give; with `versions` also
    `rollout_staleness`, the steps between the weights that sampled a token and those that are trained.

    Per sample: `truncated`, `staleness` (steps since the weights that started it),
    `environment` (its number in `environments`), and `turn`, which orders the stretches of an attempt. Group ids are tickets. `truncated`
    "mask" takes the loss of attempts that were cut off, "zero_reward" their rewards. `overlong` and `missing_eos_penalty`, of attempts that
    miss their end, are taken off at the last sampled token.
    """
    owners = [group for group in groups for _ in group.finished]
    attempts = [attempt for group in groups for attempt in group.finished]
    tokens = _concatenate([attempt.token_ids for attempt in attempts], np.int32)
    kinds = _concatenate([attempt.kinds for attempt in attempts], np.uint8)
    lengths = _lengths([attempt.segment_offsets for attempt in attempts])
    attempt = np.repeat(np.arange(len(attempts), dtype=np.int64), [len(attempt.kinds) for attempt in attempts])

    penalties = np.zeros(len(attempts))
    if overlong is not None:
        penalties += overlong.compute_penalties(_sums(attempt, lengths * (kinds != SEGMENT_PROMPT), len(attempts)))
    if missing_eos_penalty is not None:
        penalties += missing_eos_penalties(attempts, missing_eos_penalty)
    earned = _rewards(attempts, penalties, truncated)

    # every attempt begins with a prompt, and every prompt begins a stretch
    stretch = np.cumsum(kinds == SEGMENT_PROMPT) - 1
    has_sampled = (_sums(stretch, lengths * (kinds == SEGMENT_SAMPLED)) > 0)[stretch]
    if not has_sampled.all():
        tokens = tokens[np.repeat(has_sampled, lengths)]
        kinds, lengths, attempt, stretch = kinds[has_sampled], lengths[has_sampled], attempt[has_sampled], stretch[has_sampled]
    begins = kinds == SEGMENT_PROMPT
    is_response = ~begins
    attempt_of_sample = attempt[begins]
    stretch = np.cumsum(begins) - 1
    actions = _sums(stretch, lengths * is_response)

    answers, answer_lengths = kinds[is_response] == SEGMENT_SAMPLED, lengths[is_response]
    scored = np.repeat(answers, answer_lengths)
    columns: dict[str, npt.NDArray[Any]] = {}
    for row in list_common_columns(attempts):
        columns[row.column] = np.zeros(len(scored), dtype=row.dtype)
        if row.per == "token":
            columns[row.column][scored] = _join_column(attempts, row)
        else:
            # few tokens hold a number of their turn: only those are looked up
            of_turns = earned if row.name == "rewards" else _join_column(attempts, row)
            places = np.flatnonzero(of_turns != 0)
            columns[row.column][_places(places, answers, answer_lengths)] = of_turns[places]

    if versions:
        columns[ROLLOUT_STALENESS] = np.zeros(len(scored), dtype=np.float32)
        sampled_by = _concatenate([attempt.versions.per_token(len(attempt.logprobs)) for attempt in attempts], np.int64)
        columns[ROLLOUT_STALENESS][scored] = version - sampled_by

    cut_off = _cut_off(attempts)
    action_offsets = offsets_of(actions)
    weight = scored.view(np.uint8)
    if truncated == "mask":
        weight[np.repeat(cut_off[attempt_of_sample], actions)] = 0
    number_of = {name: number for number, name in enumerate(environments)}
    of_attempts = {
        "truncated": cut_off,
        "staleness": version - np.array([group.start_version for group in owners], dtype=np.int64),
        "environment": np.array([number_of[group.environment] for group in owners], dtype=np.int64),
        # its first sample's number, taken off below
        "turn": -np.searchsorted(attempt_of_sample, np.arange(len(attempts))),
    }
    sample_values = {name: values[attempt_of_sample] for name, values in of_attempts.items()}
    sample_values["turn"] += np.arange(len(actions), dtype=np.int64)
    return SampleColumns.create(
        input_ids=tokens,
        token_offsets=offsets_of(_sums(stretch, lengths)),
        action_offsets=action_offsets,
        loss_weight=weight,
        columns=columns,
        sample_values=sample_values,
        group_ids=np.array([group.ticket for group in owners], dtype=np.int64)[attempt_of_sample],
        trajectory_ids=attempt_of_sample,
    )


def list_common_columns(attempts: Sequence[Trajectory]) -> list[RolloutColumn]:
    """Return the rows of the table that every attempt has in which something was sampled."""
    answered = [attempt for attempt in attempts if len(attempt.logprobs)]
    return [
        row
        for row in rollout_columns.ROLLOUT_COLUMNS
        if row.in_every_attempt or (answered and all(attempt.per_token(row) is not None for attempt in answered))
    ]


def collect_learned(
    groups: Sequence[Group], columns: SampleColumns, advantages: npt.NDArray[np.float32], logprobs: npt.NDArray[np.float32]
) -> list[LearnedAttempt]:
    """Return what is learned from each attempt of `groups`, given `to_columns` of them and float32[A] on its action axis.

    Attempts without a loss are left out.
    """
    scored = columns.loss_weight != 0
    before = np.concatenate([[0], np.cumsum(scored)])[columns.action_offsets]
    advantages, logprobs = advantages[scored], logprobs[scored]
    attempts = [(group.ticket, attempt) for group in groups for attempt in group.finished]
    places = pairwise(offsets_of(_sums(columns.trajectory_ids, np.diff(before), len(attempts))))
    learned = []
    for (ticket, attempt), (start, end) in zip(attempts, places, strict=True):
        if start < end:
            learned.append(LearnedAttempt(ticket, attempt.member, advantages[start:end], logprobs[start:end]))
    return learned


def _rewards(attempts: Sequence[Trajectory], penalties: npt.NDArray[np.float64], truncated: Truncated) -> npt.NDArray[np.float64]:
    """float64: the rewards of all sampled tokens, shaped; `penalties` float64[attempts] are taken off."""
    rewards = _concatenate([attempt.rewards for attempt in attempts], np.float64)
    sampled = np.array([len(attempt.rewards) for attempt in attempts], dtype=np.int64)
    more = np.array([attempt.unplaced_reward for attempt in attempts], dtype=np.float64)
    if truncated == "zero_reward":
        cut_off = _cut_off(attempts)
        rewards[np.repeat(cut_off, sampled)] = 0
        more[cut_off] = 0
    more -= penalties
    changed = (sampled > 0) & (more != 0)
    last = (offsets_of(sampled)[1:] - 1)[changed]
    rewards[last] = rewards[last] + more[changed]
    return rewards


def _join_column(attempts: Sequence[Trajectory], row: RolloutColumn) -> npt.NDArray[Any]:
    """Return the numbers of a row, of all sampled tokens."""
    present = [attempt.per_token(row) for attempt in attempts]
    return _concatenate([values for values in present if values is not None], row.dtype)


def _places(sampled: IntArray, answers: npt.NDArray[np.bool_], lengths: IntArray) -> IntArray:
    """Return, for numbers of sampled tokens, their places among all tokens of the segments, of which `answers` were sampled."""
    ends = np.cumsum(lengths)[answers]
    counted = np.cumsum(lengths[answers])
    segment = np.searchsorted(counted, sampled, side="right")
    return sampled + (ends - counted)[segment]


def _lengths(offsets: Sequence[IntArray]) -> IntArray:
    """int64: the lengths of all segments, one attempt after the other."""
    joined = np.diff(_concatenate(offsets, np.int64))
    between = offsets_of([len(array) for array in offsets])[1:-1] - 1
    return np.delete(joined, between)


def _cut_off(attempts: Sequence[Trajectory]) -> npt.NDArray[np.bool_]:
    return np.array([attempt.status == "truncated" for attempt in attempts], dtype=np.bool_)


def _sums(index: IntArray, values: IntArray, count: int = 0) -> IntArray:
    """int64[count or more]: exact sums of `values` by `index`, below 2^53."""
    return np.bincount(index, weights=values, minlength=count).astype(np.int64)


def _concatenate(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)
