"""Evaluation on held-out tasks: average rewards, pass@k, and how sure they are."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from attrs import evolve

from skyrl_engine.config.schema import EvaluationConfig
from skyrl_engine.config.schema.evaluation import list_pass_numbers
from skyrl_engine.contracts.kinds.environment import Environment, Split, Task
from skyrl_engine.contracts.kinds.generator import Sampling
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.rollout.attempt import RolloutLimits
from skyrl_engine.rollout.pass_at_k import estimate, pass_at_k
from skyrl_engine.rollout.request_queue import CompletionSource
from skyrl_engine.rollout.runner import Episodes, RolloutRunner, Turns
from skyrl_engine.training.rl.metrics import majorities, metrics_of_environments
from skyrl_engine.training.rl.tasks import task_at, tasks_in

FIRST_NUMBER: Final = 2**40
"""Numbers of attempts of evaluations, and of their requests, begin here: no training attempt has them."""


def tasks_of(environments: Sequence[BoundPlugin[Environment]], count: int, split: Split = "eval") -> list[tuple[int, Task]]:
    """Return the first tasks of every environment, held-out ones, `count` of all together in equal shares; fewer where there are fewer."""
    held_out: list[tuple[int, Task]] = []
    for number, part in enumerate(environments):
        tasks = tasks_in(part, split)
        share = count // len(environments) + (number < count % len(environments))
        held_out += [(number, task_at(part, tasks, index)) for index in range(min(share, len(tasks)))]
    return held_out


def attempts(
    tasks: Sequence[tuple[int, Task]],
    config: EvaluationConfig,
    *,
    sampler: CompletionSource,
    episodes: Episodes,
    turns: Turns,
    names: Sequence[str],
    environments: Sequence[BoundPlugin[Environment]],
    limits: RolloutLimits,
    sampling: Sampling,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[Group]:
    """Attempt every task `config.samples` times, with the evaluation's own temperature and seeds; groups in the order of the tasks.

    `on_progress` is called with the number of tasks that are done. Any share of attempts may fail, but not all of the first ones: RolloutError
    is raised then, unless `limits.all_may_fail`.
    """
    runner = RolloutRunner(
        sampler,
        episodes,
        turns,
        names,
        [part.product.claims for part in environments],
        evolve(sampling, temperature=config.temperature),
        evolve(limits, group_size=config.samples, max_failure_share=1.0, min_group_size=0),
        seed=int(np.random.SeedSequence([seed, FIRST_NUMBER]).generate_state(1, np.uint32)[0]),
        first_number=FIRST_NUMBER,
    )
    for ticket, (environment, task) in enumerate(tasks):
        runner.start(ticket, environment, task, 0)
    groups: list[Group] = []
    while runner.running:
        groups += runner.advance(1.0)
        if on_progress is not None:
            on_progress(len(groups))
    return sorted(groups, key=lambda group: group.ticket)


def evaluation_metrics(groups: Sequence[Group], names: Sequence[str], *, seed: int) -> dict[str, float]:
    """Metrics of evaluated groups, for all environments together and, where there are several, for each.

    `evaluation/avg@n` is the mean reward of n attempts, `evaluation/pass@k` for k of 1, 2, 4 up to n, `evaluation/maj@n` how often the answer
    that most of them gave is right; `_low` and `_high` bound each of them with 95 % by resampling tasks. Attempts that failed count as wrong,
    with reward 0; where there are any, `evaluation/failed` is their share.
    """
    metrics = _of(groups, "evaluation/", seed)
    if len(names) > 1:
        for name in names:
            if groups_of_env := [group for group in groups if group.environment == name]:
                metrics |= _of(groups_of_env, f"evaluation/{name}/", seed)
    return metrics


def _of(groups: Sequence[Group], prefix: str, seed: int) -> dict[str, float]:
    size = max((len(group.trajectories) for group in groups), default=0)
    if not size:
        return {}
    rewards = np.array(
        [[0.0 if trajectory.status == "failed" else trajectory.reward for trajectory in group.trajectories] for group in groups]
    )
    right = [sum(bool(trajectory.success) for trajectory in group.trajectories) for group in groups]
    failed = [trajectory.status == "failed" for group in groups for trajectory in group.trajectories]
    lengths = [len(trajectory.logprobs) for group in groups for trajectory in group.trajectories]
    metrics = {
        **_with_interval(f"{prefix}avg@{size}", rewards.mean(axis=1).tolist(), seed),
        f"{prefix}tokens_mean": float(np.mean(lengths)),
    }
    metrics |= metrics_of_environments((attempt for group in groups for attempt in group.trajectories), f"{prefix}environment/")
    if any(failed):
        metrics[f"{prefix}failed"] = float(np.mean(failed))
    for k in list_pass_numbers(size):
        metrics |= _with_interval(f"{prefix}pass@{k}", [pass_at_k(size, count, k) for count in right], seed)
    votes = majorities([group.trajectories for group in groups])
    return metrics if votes is None else metrics | _with_interval(f"{prefix}maj@{size}", votes, seed)


def _with_interval(name: str, per_task: Sequence[float], seed: int) -> dict[str, float]:
    estimates = estimate(per_task, seed=seed)
    return {name: estimates.mean, f"{name}_low": estimates.low, f"{name}_high": estimates.high}
