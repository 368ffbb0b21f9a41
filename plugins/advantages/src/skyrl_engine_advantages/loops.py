"""The estimators by definition: loops over trajectories and tokens in Python floats. Slow and obvious; tests compare bytes with them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

from skyrl_engine.contracts import AdvantageBatch, AdvantageOutput, FloatArray, are_tied, equalize_ties
from skyrl_engine_advantages.options import GaeOptions, GdpoOptions, GroupOptions, ReverseKlOptions, SharedOptions, TokenOptions


def grpo(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """Compute (R - mean) / (std + epsilon) of each group."""
    return _by_group(batch, options, lambda distance, _mean, _count: distance)


def rloo(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """Compute G / (G - 1) (R - mean)."""
    return _by_group(batch, options, lambda distance, _mean, count: count / (count - 1) * distance if count > 1 else 0.0)


def gdpo(batch: AdvantageBatch, options: GdpoOptions) -> FloatArray:
    """Compute the weighted sum of the parts of the reward, each normalised in its group, over the deviation of these sums."""
    trajectories = sorted(set(batch.trajectory_ids.tolist()))
    sample_of = {trajectory: batch.trajectory_ids.tolist().index(trajectory) for trajectory in trajectories}
    finished = [trajectory for trajectory in trajectories if batch.finished[sample_of[trajectory]]]
    totals: dict[int, float] = {}
    for name, values in batch.trajectory_parts().items():
        of_group: dict[int, dict[int, float]] = defaultdict(dict)
        for trajectory in finished:
            value = float(values[trajectories.index(trajectory)])
            if not math.isnan(value):
                of_group[int(batch.group_ids[sample_of[trajectory]])][trajectory] = value
        for members in of_group.values():
            mean = _in_order(members.values()) / len(members)
            tied = len(set(members.values())) == 1
            distances = {trajectory: 0.0 if tied else value - mean for trajectory, value in members.items()}
            squares = _in_order(distance * distance for distance in distances.values())
            deviation = math.sqrt(squares / max(len(members) - 1, 1)) + options.epsilon
            for trajectory, distance in distances.items():
                normalised = distance / deviation if distance != 0 else 0.0
                totals[trajectory] = totals.get(trajectory, 0.0) + options.weights.get(name, 1.0) * normalised
    of_all = [totals[trajectory] for trajectory in trajectories if trajectory in totals]
    deviation = math.sqrt(_in_order(total * total for total in of_all) / max(len(of_all) - 1, 1)) + options.epsilon
    advantages = np.zeros(len(batch.rewards))
    for sample in range(len(batch)):
        total = totals.get(int(batch.trajectory_ids[sample]), 0.0)
        for token in range(batch.action_offsets[sample], batch.action_offsets[sample + 1]):
            if batch.scored[token] and total != 0:
                advantages[token] = total / deviation
    return _finish(batch, advantages, options, normalize=False)


def maxrl(batch: AdvantageBatch, options: GroupOptions) -> FloatArray:
    """Compute (R - mean) / mean."""
    return _by_group(batch, options, lambda distance, mean, _count: distance / mean if mean > 0 else 0.0)


def reinforce_pp(batch: AdvantageBatch, options: TokenOptions) -> AdvantageOutput:
    """Compute discounted returns over scored tokens."""
    returns = np.zeros(len(batch.rewards))
    for tokens in _index_scored_tokens(batch).values():
        following = 0.0
        for token in reversed(tokens):
            following = float(batch.rewards[token]) + options.gamma * following
            returns[token] = following
    return AdvantageOutput(_finish(batch, returns, options, options.normalize == "batch"), returns)


def reverse_kl(batch: AdvantageBatch, options: ReverseKlOptions) -> FloatArray:
    """Compute discounted sums of the teacher's log-probability minus the student's, plus scaled rewards, over scored tokens."""
    teacher, student = batch.columns["teacher_logprobs"], batch.columns["old_logprobs"]
    sums = np.zeros(len(batch.rewards))
    for tokens in _index_scored_tokens(batch).values():
        following = 0.0
        for token in reversed(tokens):
            own = options.reward_coef * float(batch.rewards[token]) + float(teacher[token]) - float(student[token])
            following = own + options.gamma * following
            sums[token] = following
    return _finish(batch, sums, options, options.normalize == "batch")


def gae(batch: AdvantageBatch, options: GaeOptions) -> AdvantageOutput:
    """Compute generalized advantage estimates (Schulman et al. 2016, arXiv:1506.02438, equation 16) over scored tokens."""
    values = batch.columns["old_values"]
    decay = options.gamma * options.lam
    estimates, returns = np.zeros(len(batch.rewards)), np.zeros(len(batch.rewards))
    for tokens in _index_scored_tokens(batch).values():
        following_value = following_estimate = 0.0
        for token in reversed(tokens):
            value = float(values[token])
            delta = float(batch.rewards[token]) + options.gamma * following_value - value
            following_estimate = delta + decay * following_estimate
            estimates[token], returns[token] = following_estimate, following_estimate + value
            following_value = value
    return AdvantageOutput(_finish(batch, estimates, options, options.normalize == "batch"), returns)


def _by_group(batch: AdvantageBatch, options: GroupOptions, formula: Callable[[float, float, int], float]) -> FloatArray:
    rewards: dict[int, float] = defaultdict(float)
    largest: dict[int, float] = defaultdict(float)
    group_of, finished = {}, {}
    for sample in range(len(batch)):
        trajectory = int(batch.trajectory_ids[sample])
        group_of[trajectory], finished[trajectory] = int(batch.group_ids[sample]), bool(batch.finished[sample])
        for token in range(batch.action_offsets[sample], batch.action_offsets[sample + 1]):
            rewards[trajectory] += float(batch.rewards[token])
            largest[trajectory] = max(largest[trajectory], abs(float(batch.rewards[token])))
    members = defaultdict(list)
    for trajectory in sorted(group_of):
        if finished[trajectory]:
            members[group_of[trajectory]].append(trajectory)
    worth: dict[int, float] = defaultdict(float)
    for trajectories in members.values():
        totals = equalize_ties(
            np.array([rewards[trajectory] for trajectory in trajectories]),
            np.array([largest[trajectory] for trajectory in trajectories]),
        )
        rewards.update(zip(trajectories, totals.tolist(), strict=True))
        count, total = len(trajectories), 0.0
        for trajectory in trajectories:
            total += rewards[trajectory]
        mean = total / count
        squares = 0.0
        for trajectory in trajectories:
            squares += (rewards[trajectory] - mean) * (rewards[trajectory] - mean)
        deviation = math.sqrt(squares / max(count - 1, 1))
        if len({rewards[trajectory] for trajectory in trajectories}) == 1:
            continue
        for trajectory in trajectories:
            value = formula(rewards[trajectory] - mean, mean, count)
            if options.normalize == "group" and value != 0:
                value = value / (deviation + options.epsilon)
            worth[trajectory] = value
    advantages = np.zeros(len(batch.rewards))
    for sample in range(len(batch)):
        for token in range(batch.action_offsets[sample], batch.action_offsets[sample + 1]):
            if batch.scored[token]:
                advantages[token] = worth[int(batch.trajectory_ids[sample])]
    return _finish(batch, advantages, options, options.normalize == "batch")


def _index_scored_tokens(batch: AdvantageBatch) -> dict[int, list[int]]:
    """The places of each trajectory's scored tokens, turn by turn."""
    tokens: dict[int, list[int]] = defaultdict(list)
    for sample in sorted(range(len(batch)), key=lambda sample: int(batch.turn[sample])):
        for token in range(batch.action_offsets[sample], batch.action_offsets[sample + 1]):
            if batch.scored[token]:
                tokens[int(batch.trajectory_ids[sample])].append(token)
    return tokens


def _finish(batch: AdvantageBatch, values: FloatArray, options: SharedOptions, normalize: bool) -> FloatArray:
    scored = [token for token in range(len(values)) if batch.scored[token]]
    result = values.copy()
    if normalize and scored:
        mean = _in_order(float(values[token]) for token in scored) / len(scored)
        squares = _in_order((float(values[token]) - mean) * (float(values[token]) - mean) for token in scored)
        deviation = math.sqrt(squares / len(scored))
        numbers = [float(values[token]) for token in scored]
        equal = are_tied(min(numbers), max(numbers), max(map(abs, numbers)))
        for token in scored:
            result[token] = 0.0 if equal else (float(values[token]) - mean) / (deviation + options.epsilon)
    if options.clip is not None:
        for token in scored:
            result[token] = min(max(result[token], -options.clip), options.clip)
    return result


def _in_order(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
