"""Trajectories as columns, with array operations alone. A stretch becomes one sample; every sampled token is scored in exactly one."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.rollout import PROMPT, SAMPLED, Group, Trajectory

Truncated = Literal["keep", "mask", "zero_reward"]


@frozen
class Overlong:
    """A soft punishment of length (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13).

    Up to `start` sampled and observed tokens nothing is taken off the reward, from there on evenly more, up to `penalty` at `end`.
    """

    start: float
    end: int
    penalty: float

    def taken_off(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """float64 of the shape of `lengths`: what attempts of these lengths lose."""
        shares: npt.NDArray[np.float64] = np.clip((lengths - self.start) / (self.end - self.start), 0.0, 1.0)
        return shares * self.penalty


def to_columns(
    groups: Sequence[Group],
    *,
    environments: Sequence[str],
    version: int = 0,
    truncated: Truncated = "keep",
    overlong: Overlong | None = None,
) -> SampleColumns:
    """Lay out the attempts of groups that did not fail, in the order of groups and members; `version` is that of the weights to be trained.

    The action axis of a sample is everything behind its prompt; the loss weight is 1 on sampled tokens and 0 on observed ones. Columns:
    `rewards`, each at the last token of its turn, and `rollout_logprobs`, 0 where nothing was sampled. Per sample: `truncated`, `staleness`
    (steps since the weights that started it), `environment` (its number in `environments`), and `turn`, which orders the stretches of an
    attempt. Group ids are tickets. `truncated` "mask" takes the loss of attempts that were cut off, "zero_reward" their rewards.
    """
    attempts = [each for group in groups for each in group.finished]
    owners = [group for group in groups for _ in group.finished]
    kinds = _joined([each.kinds for each in attempts], np.uint8)
    segments = _joined([np.diff(each.segment_offsets) for each in attempts], np.int64)
    sampled_counts = np.array([len(each.logprobs) for each in attempts], dtype=np.int64)

    # stretches: each begins with a prompt, and so does every attempt
    begins = kinds == PROMPT
    stretch = np.cumsum(begins) - 1
    count = int(begins.sum())
    tokens = _sums(stretch, segments, count)
    actions = tokens - segments[begins]
    per_attempt = np.array([int((each.kinds == PROMPT).sum()) for each in attempts], dtype=np.int64)
    attempt = np.repeat(np.arange(len(attempts), dtype=np.int64), per_attempt)

    behind = np.repeat(~begins, segments)
    scored = np.repeat(kinds == SAMPLED, segments)[behind]
    rewards, logprobs = np.zeros(len(scored), dtype=np.float32), np.zeros(len(scored), dtype=np.float32)
    logprobs[scored] = _joined([each.logprobs for each in attempts], np.float32)
    rewards[scored] = _rewards(attempts, sampled_counts, truncated, overlong)

    cut_off = np.array([each.status == "truncated" for each in attempts], dtype=np.bool_)
    action_offsets = offsets_of(actions)
    weight = scored.astype(np.uint8)
    if truncated == "mask":
        weight[np.repeat(cut_off[attempt], actions)] = 0
    tickets = np.array([group.ticket for group in owners], dtype=np.int64)
    started = np.array([group.start_version for group in owners], dtype=np.int64)
    number_of = {name: number for number, name in enumerate(environments)}
    where = np.array([number_of[group.environment] for group in owners], dtype=np.int64)
    return SampleColumns.create(
        input_ids=_joined([each.token_ids for each in attempts], np.int32),
        token_offsets=offsets_of(tokens),
        action_offsets=action_offsets,
        loss_weight=weight,
        columns={"rewards": rewards, "rollout_logprobs": logprobs},
        sample_values={
            "truncated": cut_off[attempt],
            "staleness": (version - started)[attempt],
            "environment": where[attempt],
            "turn": np.arange(count, dtype=np.int64) - offsets_of(per_attempt)[:-1][attempt],
        },
        group_ids=tickets[attempt],
        trajectory_ids=attempt,
    )


def _rewards(
    attempts: Sequence[Trajectory], sampled: npt.NDArray[np.int64], truncated: Truncated, overlong: Overlong | None
) -> npt.NDArray[np.float32]:
    """float32: the rewards of all sampled tokens, shaped."""
    rewards = _joined([each.rewards for each in attempts], np.float32)
    last = offsets_of(sampled)[1:] - 1
    has = sampled > 0
    more = np.array([each.unplaced_reward for each in attempts], dtype=np.float64)
    if truncated == "zero_reward":
        cut_off = np.array([each.status == "truncated" for each in attempts], dtype=np.bool_)
        rewards[np.repeat(cut_off, sampled)] = 0
        more[cut_off] = 0
    if overlong is not None:
        lengths = np.array([int((~_prompt(each)).sum()) for each in attempts], dtype=np.int64)
        more -= overlong.taken_off(lengths)
    rewards[last[has]] += more[has].astype(np.float32)
    return rewards


def _prompt(attempt: Trajectory) -> npt.NDArray[np.bool_]:
    return np.repeat(attempt.kinds == PROMPT, np.diff(attempt.segment_offsets))


def _sums(index: npt.NDArray[np.int64], values: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """int64[count]: exact sums of `values` by `index`, below 2^53."""
    return np.bincount(index, weights=values, minlength=count).astype(np.int64)


def _joined(parts: Sequence[npt.ArrayLike], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)
