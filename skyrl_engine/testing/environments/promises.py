"""Promises of every environment, as far as its claims go."""

from typing import Any

from skyrl_engine.testing.environments.comparison_promises import (
    attempt_order,
    attempts_unchanged,
    comparisons,
    comparisons_repeat,
)
from skyrl_engine.testing.environments.episode_promises import (
    answers,
    closes,
    done_and_messages,
    echo,
    ends,
    episodes_apart,
    garbage,
    parts,
    process_state,
    random_state,
    repeatable,
    rewards,
    roles,
    solution,
    task_unchanged,
)
from skyrl_engine.testing.environments.task_promises import keys, same_in_another_process, same_tasks, well_formed
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.promise import Promise

ENVIRONMENT_PROMISES: tuple[Promise[Any, Any], ...] = (
    well_formed,
    same_tasks,
    same_in_another_process,
    keys,
    answers,
    repeatable,
    episodes_apart,
    ends,
    rewards,
    done_and_messages,
    roles,
    closes,
    garbage,
    task_unchanged,
    random_state,
    process_state,
    solution,
    echo,
    parts,
    comparisons,
    comparisons_repeat,
    attempt_order,
    attempts_unchanged,
    *PLUGIN_PROMISES,
)
