"""Metrics of a step's rollouts: rewards, successes, lengths, and what was dropped."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from skyrl_engine.contracts.values.rollout import Group, Trajectory
from skyrl_engine.rollout.pass_at_k import pass_at_k


def rollout_metrics(trained: Sequence[Group], finished: Sequence[Group], environments: Sequence[str]) -> dict[str, float]:
    """Metrics of the groups that a step trains on, and of all that finished for it, dropped ones too.

    `environments` are the names of all that the run has; where there are several, rewards are reported for each.
    """
    attempts = [each for group in trained for each in group.finished]
    everything = [each for group in finished for each in group.trajectories]
    metrics = {**_rewards(attempts), **_lengths(attempts), **_successes(trained)}
    metrics["reward/all_mean"] = _mean(each.reward for each in everything if each.status != "failed")
    if len(environments) > 1:
        for name in environments:
            own = [each.reward for group in trained if group.environment == name for each in group.finished]
            if own:
                metrics[f"reward/{name}/mean"] = _mean(own)
    for name, values in _parts(attempts).items():
        metrics[f"reward/part/{name}"] = _mean(values)
    metrics["rollout/zero_variance"] = _mean(float(_equal(group)) for group in finished)
    for reason, count in Counter(group.dropped for group in finished if group.dropped is not None).items():
        metrics[f"rollout/dropped/{reason}"] = count / len(finished)
    metrics["rollout/failed"] = _mean(float(each.status == "failed") for each in everything)
    return metrics


def _rewards(attempts: Sequence[Trajectory]) -> dict[str, float]:
    rewards = np.array([each.reward for each in attempts], dtype=np.float64)
    if not len(rewards):
        return {}
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }


def _lengths(attempts: Sequence[Trajectory]) -> dict[str, float]:
    if not attempts:
        return {}
    lengths = np.array([len(each.logprobs) for each in attempts], dtype=np.float64)
    stops = Counter(stop for each in attempts for stop in each.stops)
    turns = sum(stops.values())
    return {
        "rollout/tokens_mean": float(lengths.mean()),
        "rollout/tokens_max": float(lengths.max()),
        "rollout/turns_mean": _mean(each.turns for each in attempts),
        "rollout/truncated": _mean(float(each.status == "truncated") for each in attempts),
        "rollout/tool_problems": _mean(float(each.tool_problems > 0) for each in attempts),
        **{f"rollout/stopped_by/{stop}": count / turns for stop, count in sorted(stops.items())},
    }


def _successes(groups: Sequence[Group]) -> dict[str, float]:
    """Shares of successes; pass@k for k of 1 and of the group's size, where every attempt says whether it succeeded."""
    judged = [group for group in groups if group.finished and all(each.success is not None for each in group.finished)]
    if not judged:
        return {}
    counts = [(len(group.finished), sum(bool(each.success) for each in group.finished)) for group in judged]
    metrics = {"rollout/success": sum(right for _, right in counts) / sum(attempts for attempts, _ in counts)}
    largest = max(attempts for attempts, _ in counts)
    for k in sorted({1, largest}):
        shares = [pass_at_k(attempts, right, k) for attempts, right in counts if attempts >= k]
        metrics[f"rollout/pass@{k}"] = _mean(shares)
    return metrics


def _parts(attempts: Iterable[Trajectory]) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {}
    for each in attempts:
        for name, value in each.parts.items():
            parts.setdefault(name, []).append(value)
    return parts


def _equal(group: Group) -> bool:
    return len({each.reward for each in group.finished}) <= 1


def _mean(values: Iterable[float]) -> float:
    taken = list(values)
    return float(sum(taken) / len(taken)) if taken else 0.0
