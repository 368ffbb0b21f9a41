"""Metrics of a step's rollouts: rewards, successes, lengths, and what was dropped."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.values.rollout import Group, Trajectory
from skyrl_engine.rollout.background_source import SamplingStatus
from skyrl_engine.rollout.columns import Overlong, Truncated, length_penalties, missing_eos_penalties
from skyrl_engine.rollout.pass_at_k import majority, pass_at_k
from skyrl_engine.training.rl.reward_model import is_value


def rollout_metrics(
    trained: Sequence[Group],
    finished: Sequence[Group],
    environments: Sequence[str],
    *,
    truncated: Truncated = "keep",
    overlong: Overlong | None = None,
    missing_eos_penalty: float | None = None,
) -> dict[str, float]:
    """Metrics of the groups that a step trains on, and of all that finished for it, dropped ones too.

    `environments` are the names of all that the run has; where there are several, rewards and successes are reported for each. Rewards are
    those that are trained on: without what `overlong` and `missing_eos_penalty` take off, and 0 for attempts that were cut off where
    `truncated` is "zero_reward".
    """
    attempts = [attempt for group in trained for attempt in group.finished]
    everything = [trajectory for group in finished for trajectory in group.trajectories]
    rewards = _shape_rewards(attempts, truncated, overlong, missing_eos_penalty)
    metrics = {**_rewards(rewards), **_lengths(attempts), **_successes(trained)}
    metrics["reward/all_mean"] = _mean(
        _shape_rewards([attempt for attempt in everything if attempt.status != "failed"], truncated, overlong, missing_eos_penalty)
    )
    if len(environments) > 1:
        names = np.array([group.environment for group in trained for _ in group.finished])
        for name in environments:
            if (is_of_env := names == name).any():
                metrics[f"reward/{name}/mean"] = _mean(rewards[is_of_env])
            metrics |= _successes([group for group in trained if group.environment == name], f"rollout/{name}/")
    if overlong is not None and attempts:
        metrics["reward/part/overlong"] = -_mean(length_penalties(attempts, overlong))
    if missing_eos_penalty is not None and attempts:
        metrics["reward/part/missing_eos"] = -_mean(missing_eos_penalties(attempts, missing_eos_penalty))
        metrics["rollout/missing_eos"] = _mean(attempt.misses_end for attempt in attempts)
    for name, values in _parts(attempts).items():
        metrics[f"reward/part/{name}"] = _mean(values)
    metrics["rollout/zero_variance"] = _mean(float(_has_equal_rewards(group)) for group in finished)
    for reason, count in Counter(group.dropped for group in finished if group.dropped is not None).items():
        metrics[f"rollout/dropped/{reason}"] = count / len(finished)
    metrics["rollout/failed"] = _mean(float(attempt.status == "failed") for attempt in everything)
    return metrics | metrics_of_environments(everything)


def metrics_of_environments(attempts: Iterable[Trajectory], prefix: str = "environment/") -> dict[str, float]:
    """Mean over the attempts that have it, and sum, of every metric that an environment gives; failed attempts too, since they cost as much."""
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        for name, value in attempt.metrics.items():
            if not is_value(name):
                found.setdefault(name, []).append(value)
    return {
        f"{prefix}{name}/{kind}": float(value)
        for name, values in sorted(found.items())
        for kind, value in (("mean", _mean(values)), ("sum", sum(values)))
    }


def staleness_metrics(trained: Sequence[Group], version: int, status: SamplingStatus) -> dict[str, float]:
    """Metrics of sampling beside training: the age of what is trained, as `version` counts, seconds waited since the last step, and queues.

    A group's staleness is counted in steps from the weights that it was started with, a token's from those that sampled it. The seconds of
    `status` are set back.
    """
    attempts = [attempt for group in trained for attempt in group.finished]
    ages = np.array([version - group.start_version for group in trained for _ in group.finished], dtype=np.int64)
    of_tokens = [version - attempt.versions.per_token(len(attempt.logprobs)) for attempt in attempts]
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *of_tokens])
    metrics = {
        "async/waited_seconds": status.trainer_waited,
        "async/sampler_waited_seconds": status.sampler_waited,
        "async/drain_seconds": status.drain,
        "async/groups_ready": float(status.groups_ready),
        "async/groups_running": float(status.groups_running),
        "async/attempts_at_generator": float(status.at_generator),
        "async/attempts_at_environment": float(status.at_environment),
        "async/versions_per_attempt": _mean(len(attempt.versions.versions) for attempt in attempts),
    }
    status.trainer_waited = status.sampler_waited = status.drain = 0.0
    if len(ages):
        metrics |= {"async/staleness_mean": float(ages.mean()), "async/staleness_max": float(ages.max())}
    for age in range(int(tokens.max(initial=0)) + 1):
        metrics[f"async/tokens_of_staleness/{age}"] = float((tokens == age).mean()) if len(tokens) else 0.0
    return metrics


def _shape_rewards(
    attempts: Sequence[Trajectory], truncated: Truncated, overlong: Overlong | None, missing_eos_penalty: float | None
) -> npt.NDArray[np.float64]:
    """float64[N]: the rewards of attempts as they are trained on."""
    zeroed = truncated == "zero_reward"
    rewards = np.array(
        [0.0 if zeroed and attempt.status == "truncated" else attempt.reward for attempt in attempts], dtype=np.float64
    )
    if overlong is not None:
        rewards -= length_penalties(attempts, overlong)
    if missing_eos_penalty is not None:
        rewards -= missing_eos_penalties(attempts, missing_eos_penalty)
    return rewards


def _rewards(rewards: npt.NDArray[np.float64]) -> dict[str, float]:
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
    lengths = np.array([len(attempt.logprobs) for attempt in attempts], dtype=np.float64)
    stops = Counter(stop for attempt in attempts for stop in attempt.stops)
    turns = sum(stops.values())
    return {
        "rollout/tokens_mean": float(lengths.mean()),
        "rollout/tokens_max": float(lengths.max()),
        "rollout/turns_mean": _mean(attempt.turns for attempt in attempts),
        "rollout/truncated": _mean(float(attempt.status == "truncated") for attempt in attempts),
        "rollout/tool_problems": _mean(float(attempt.tool_problems > 0) for attempt in attempts),
        **{f"rollout/stopped_by/{stop}": count / turns for stop, count in sorted(stops.items())},
    }


def _successes(groups: Sequence[Group], prefix: str = "rollout/") -> dict[str, float]:
    """Shares of successes where every attempt says whether it succeeded; pass@k for k of 1 and of the group's size, and maj@k of votes."""
    judged = [group for group in groups if group.finished and all(attempt.success is not None for attempt in group.finished)]
    if not judged:
        return {}
    counts = [(len(group.finished), sum(bool(attempt.success) for attempt in group.finished)) for group in judged]
    metrics = {f"{prefix}success": sum(right for _, right in counts) / sum(attempts for attempts, _ in counts)}
    largest = max(attempts for attempts, _ in counts)
    for k in sorted({1, largest}):
        shares = [pass_at_k(attempts, right, k) for attempts, right in counts if attempts >= k]
        metrics[f"{prefix}pass@{k}"] = _mean(shares)
    whole = [group.finished for group in judged if len(group.finished) == largest]
    votes = majorities(whole)
    return metrics if votes is None else metrics | {f"{prefix}maj@{largest}": _mean(votes)}


def majorities(groups: Sequence[Sequence[Trajectory]]) -> list[float] | None:
    """Return for every group whether the answer that most of its attempts gave is right; None where no attempt says what it answers."""
    if all(attempt.answer is None for attempts in groups for attempt in attempts):
        return None
    return [majority([(attempt.answer, bool(attempt.success)) for attempt in attempts]) for attempts in groups]


def _parts(attempts: Iterable[Trajectory]) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {}
    for attempt in attempts:
        for name, value in attempt.parts.items():
            parts.setdefault(name, []).append(value)
    return parts


def _has_equal_rewards(group: Group) -> bool:
    return len(set(group.rewards.tolist())) <= 1


def _mean(values: Iterable[float]) -> float:
    taken = list(values)
    return float(sum(taken) / len(taken)) if taken else 0.0
