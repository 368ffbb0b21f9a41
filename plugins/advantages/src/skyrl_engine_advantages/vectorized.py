"""The estimators as array operations, in float64. `reference.py` holds the loops that define them; both give the same bytes.

Sums go in the order of tokens and of trajectories, as the loops add: `np.bincount` and `np.add.accumulate` do, `np.sum` does not.
"""

from collections.abc import Callable, Mapping

import numpy as np

from skyrl_engine import DataError
from skyrl_engine.contracts import AdvantageBatch, AdvantageOutput, FloatArray, IntArray, are_tied
from skyrl_engine_advantages.options import GaeOptions, GdpoOptions, GroupOptions, ReverseKlOptions, SharedOptions, TokenOptions


def grpo(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """Compute (R - mean) / (std + epsilon) over the finished trajectories of a group, spread over their scored tokens; [A]."""
    groups = _Groups(batch)
    return _spread(batch, groups, groups.centred, options)


def rloo(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """Compute G / (G - 1) (R - mean): the reward minus the mean of the others; [A]."""
    groups = _Groups(batch)
    count = groups.count[groups.of]
    factor = np.where(count > 1, count / np.maximum(count - 1, 1), 0.0)
    return _spread(batch, groups, factor * groups.centred, options)


def gdpo(batch: AdvantageBatch, options: GdpoOptions) -> FloatArray:
    """Compute the weighted sum of the parts of the reward, each normalised in its group, over the deviation of these sums; [A]."""
    parts = batch.trajectory_parts()
    refuse_unknown_parts(options.weights, parts)
    groups, finished = batch.group_of_trajectory, batch.finished_trajectories
    size = int(groups.max(initial=-1)) + 1
    totals = np.zeros(len(groups))
    rated = np.zeros(len(groups), dtype=np.bool_)
    for name, values in parts.items():
        here = finished & ~np.isnan(values)
        own, of = values[here], groups[here]
        count = np.maximum(np.bincount(of, minlength=size), 1)
        mean = np.bincount(of, weights=own, minlength=size) / count
        lowest, highest = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(lowest, of, own)
        np.maximum.at(highest, of, own)
        distance = np.where((lowest < highest)[of], own - mean[of], 0.0)
        squares = np.bincount(of, weights=distance * distance, minlength=size)
        deviation = np.sqrt(squares / np.maximum(count - 1, 1))[of] + options.epsilon
        normalised = np.where(distance == 0, 0.0, distance / np.where(distance == 0, 1.0, deviation))
        totals[here] += options.weights.get(name, 1.0) * normalised
        rated |= here
    of_all = totals[rated]
    deviation_of_all = np.sqrt(_total(of_all * of_all) / max(len(of_all) - 1, 1)) + options.epsilon if len(of_all) else 1.0
    return _clip(batch.spread(np.where(totals == 0, 0.0, totals / deviation_of_all) if totals.any() else totals), options)


def refuse_unknown_parts(weights: Mapping[str, float], parts: Mapping[str, FloatArray]) -> None:
    """Raise DataError for a weight of a part that no attempt of the batch has."""
    unknown = [name for name in weights if name not in parts]
    if unknown:
        raise DataError(
            f"advantage.weights names the part {unknown[0]!r}, and the rewards of this batch have {', '.join(sorted(parts))}",
            remedy="Name parts as the environment does: the names of its reward functions",
        )


def maxrl(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """Compute (R - mean) / mean, and 0 where the mean is not above 0; [A]."""
    groups = _Groups(batch)
    mean = groups.mean[groups.of]
    return _spread(batch, groups, np.where(mean > 0, groups.centred / np.where(mean > 0, mean, 1.0), 0.0), options)


def reinforce_pp(batch: AdvantageBatch, options: TokenOptions) -> AdvantageOutput:
    """Compute discounted returns over scored tokens; [A] each."""

    def backward(rewards: FloatArray, following: FloatArray) -> FloatArray:
        return rewards + options.gamma * following

    returns = _backwards(batch, backward, batch.rewards)
    return AdvantageOutput(_whiten_and_clip(batch, returns, options), returns)


def reverse_kl(batch: AdvantageBatch, options: ReverseKlOptions) -> FloatArray:
    """Compute discounted sums of the teacher's log-probability minus the student's, plus scaled rewards, over scored tokens; [A]."""
    teacher, student = (batch.columns[name].astype(np.float64) for name in ("teacher_logprobs", "old_logprobs"))
    own = options.reward_coef * batch.rewards + teacher - student

    def backward(deltas: FloatArray, following: FloatArray) -> FloatArray:
        return deltas + options.gamma * following

    return _whiten_and_clip(batch, _backwards(batch, backward, own), options)


def gae(batch: AdvantageBatch, options: GaeOptions) -> AdvantageOutput:
    """Compute generalized advantage estimates over scored tokens, and returns: the estimates, not normalised, plus the old values; [A] each."""
    values = batch.columns["old_values"].astype(np.float64)
    deltas = _temporal_differences(batch, values, options.gamma)
    decay = options.gamma * options.lam

    def backward(delta: FloatArray, following: FloatArray) -> FloatArray:
        return delta + decay * following

    estimates = _backwards(batch, backward, deltas)
    return AdvantageOutput(_whiten_and_clip(batch, estimates, options), np.where(batch.scored, estimates + values, 0.0))


class _Groups:
    """Finished trajectories by group: how many, their mean reward, and each reward's distance from it, exactly 0 where all are a tie."""

    def __init__(self, batch: AdvantageBatch) -> None:
        self.of = batch.group_of_trajectory
        self.rewards, self.finished = batch.trajectory_rewards(), batch.finished_trajectories
        self.groups = int(self.of.max(initial=-1)) + 1
        self.count = np.bincount(self.of[self.finished], minlength=self.groups)
        self.mean = self.sums(self.rewards) / np.maximum(self.count, 1)
        lowest, highest = np.full(self.groups, np.inf), np.full(self.groups, -np.inf)
        np.minimum.at(lowest, self.of[self.finished], self.rewards[self.finished])
        np.maximum.at(highest, self.of[self.finished], self.rewards[self.finished])
        differ = (lowest < highest)[self.of] & self.finished
        self.centred = np.where(differ, self.rewards - self.mean[self.of], 0.0)

    def sums(self, values: FloatArray) -> FloatArray:
        """float64 [groups]: sums of `values` [R] over finished trajectories."""
        sums: FloatArray = np.bincount(self.of[self.finished], weights=values[self.finished], minlength=self.groups).astype(
            np.float64, copy=False
        )
        return sums

    def deviation(self, values: FloatArray) -> FloatArray:
        """float64 [groups]: the sample standard deviation (G - 1) of `values` [R]; 0 for a group of one."""
        mean = self.sums(values) / np.maximum(self.count, 1)
        squares = self.sums((values - mean[self.of]) ** 2)
        return np.sqrt(squares / np.maximum(self.count - 1, 1))


def _spread(batch: AdvantageBatch, groups: _Groups, values: FloatArray, options: GroupOptions) -> FloatArray:
    if options.normalize == "group":
        deviation = groups.deviation(groups.rewards)[groups.of] + options.epsilon
        values = np.where(values == 0, 0.0, values / np.where(values == 0, 1.0, deviation))
    advantages = batch.spread(values)
    if options.normalize == "batch":
        advantages = _whiten(batch, advantages, options.epsilon)
    return _clip(advantages, options)


def _whiten_and_clip(batch: AdvantageBatch, values: FloatArray, options: TokenOptions) -> FloatArray:
    return _clip(_whiten(batch, values, options.epsilon) if options.normalize == "batch" else values, options)


def _clip(values: FloatArray, options: SharedOptions) -> FloatArray:
    return values if options.clip is None else np.clip(values, -options.clip, options.clip)


def _whiten(batch: AdvantageBatch, values: FloatArray, epsilon: float) -> FloatArray:
    """Shift and scale the scored tokens of a batch to mean 0 and standard deviation 1; all 0 where they are a tie."""
    scored = values[batch.scored]
    if not len(scored) or are_tied(scored.min(), scored.max(), np.abs(scored).max()):
        return np.zeros_like(values)
    mean = _total(scored) / len(scored)
    deviation = np.sqrt(_total((scored - mean) ** 2) / len(scored))
    normalised: FloatArray = np.where(batch.scored, (values - mean) / (deviation + epsilon), 0.0)
    return normalised


def _total(values: FloatArray) -> np.float64:
    return np.float64(np.add.accumulate(values)[-1])


def _temporal_differences(batch: AdvantageBatch, values: FloatArray, gamma: float) -> FloatArray:
    """float64 [A]: reward plus the discounted value of the next scored token, minus the token's own value."""
    places, bounds = batch.walk()
    following = np.zeros(len(places))
    following[:-1] = values[places[1:]]
    filled = np.flatnonzero(np.diff(bounds))
    following[bounds[filled + 1] - 1] = 0.0
    deltas = np.zeros(len(values))
    deltas[places] = batch.rewards[places] + gamma * following - values[places]
    return deltas


def _backwards(batch: AdvantageBatch, step: Callable[[FloatArray, FloatArray], FloatArray], source: FloatArray) -> FloatArray:
    """float64 [A]: `step(source, result of the next scored token)`, from the end of every trajectory to its start.

    One round per position, for all trajectories at once; the longest come first, so that those still running are a prefix.
    """
    places, bounds = batch.walk()
    lengths = np.diff(bounds)
    longest_first = np.argsort(-lengths, kind="stable")
    ends, lengths = bounds[1:][longest_first], lengths[longest_first]
    running = _running(lengths)
    result = np.zeros(len(batch.rewards))
    carried = np.zeros(len(lengths))
    for back, count in enumerate(running.tolist()):
        at = places[ends[:count] - 1 - back]
        carried = step(source[at], carried[:count])
        result[at] = carried
    return result


def _running(lengths: IntArray) -> IntArray:
    """int64[longest]: how many of these lengths, sorted downwards, reach beyond each position."""
    longest = int(lengths[0]) if len(lengths) else 0
    return np.searchsorted(-lengths, -np.arange(longest), side="left")
