"""Evaluation of a model without training it: the same attempts, seeds and numbers as an evaluation during a run."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, cast

from attrs import frozen

from skyrl_engine.cleanup import finally_close
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import GeneratorTable
from skyrl_engine.contracts.kinds.environment import Split
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.data.text.template_rule import Rendering, find_difference
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.sampling import make_sampler
from skyrl_engine.errors import ConfigError, DataError, Problem, RolloutError
from skyrl_engine.rollout.failure_monitor import name_remedy
from skyrl_engine.run.progress import LOADING
from skyrl_engine.training.rl.checks import limits_of
from skyrl_engine.training.rl.evaluation import attempts, evaluation_metrics, tasks_of
from skyrl_engine.training.rl.prepare import Progress, prepare
from skyrl_engine.training.rl.prepared import LiveRolloutSpec
from skyrl_engine.training.rl.prompts import check_prompts
from skyrl_engine.training.rl.reward_model import add_rewards
from skyrl_engine.training.rl.run import episode_pool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_COMMON: Final = 3
"""Number of causes of failures that are reported, the commonest first."""


@frozen(eq=False)
class EvaluationReport:
    """The attempts of an evaluation, a group per task in the order of the tasks, and their metrics by name, as a run writes them."""

    metrics: Mapping[str, float]
    groups: Sequence[Group]
    names: Sequence[str]
    tokenizer: "PreTrainedTokenizerBase"


def evaluate_model(
    resolved: ResolvedConfig,
    *,
    split: Split = "eval",
    progress: Progress | None = None,
    trained_on: Mapping[str, Any] | None = None,
) -> EvaluationReport:
    """Attempt tasks as `[evaluation]` says: `samples` times each of `tasks` ones, at its temperature, under the seed of `[run]`.

    `trained_on` is what the manifest of the model's run says of its training data: that its texts were written in another way is warned of.
    Raises DataError where environments have no task of this split, RolloutError where every attempt failed, and what a run by reinforcement
    raises before its first step.
    """
    prepared = prepare(resolved, trains=False)
    config = prepared.resolved.config
    if not isinstance(prepared.rollouts, LiveRolloutSpec):
        raise ConfigError([Problem("rl.rollouts", "is set, and an evaluation samples", "Remove it")])
    if trained_on is not None:
        rendering = Rendering.of_prompts(prepared.files.tokenizer, config.rl.template)
        if different := find_difference(trained_on, rendering):
            logger.warning(
                "the model is not evaluated on texts like those it was trained on: %s. %s",
                different,
                'Evaluate it as it was trained, with --set rl.template="none"'
                if rendering.kind == "chat"
                else "Remove rl.template",
            )
    environments = prepared.rollouts.tasks.environments
    tasks = tasks_of(environments, config.evaluation.tasks, split)
    if not tasks:
        raise DataError(
            f"{', '.join(part.label for part in environments)}: there is no {'held-out task' if split == 'eval' else 'task'} to attempt",
            remedy="Give the environment held-out tasks (--eval-data, eval_fraction), or choose --split train",
        )
    check_prompts(environments, tasks, prepared.rollouts.renderer, limits_of(config, prepared.files.facts))
    if progress is not None and prepared.loads:
        progress(LOADING, 0, 0)
    with ExitStack() as ends:
        generator, engine = resolved.plugins["generator"], None
        if prepared.loads:
            launched = Engine.launch(prepared.resolved, prepared.assembly, prepared.files, None, prepared.layout)
            engine = ends.enter_context(launched)
            sampler = engine.start_sampler(generator, longest=prepared.longest)
        else:
            table = cast("GeneratorTable | None", config.selected.get("generator"))
            context, longest = prepared.assembly.context, prepared.longest
            sampler = make_sampler(None, generator, table, prepared.files, context, longest=longest)
            ends.callback(sampler.close)
        pool = episode_pool(prepared)
        with finally_close(pool.shutdown):
            groups = attempts(
                tasks,
                config.evaluation,
                sampler=sampler,
                episodes=pool,
                turns=prepared.rollouts.renderer,
                names=prepared.names,
                environments=environments,
                limits=prepared.limits,
                sampling=prepared.sampling,
                seed=config.run.seed,
                on_progress=None if progress is None else lambda done: progress("tasks", done, len(tasks)),
            )
        _check_some_finished(groups)
        if prepared.reward_models:
            assert engine is not None, "a reward model works on ranks"
            for model in prepared.reward_models:
                engine.add_frozen(model.frozen)
            groups = list(add_rewards(prepared.reward_models, engine, groups))
    metrics = evaluation_metrics(groups, prepared.names, seed=config.run.seed)
    return EvaluationReport(metrics, groups, prepared.names, prepared.files.tokenizer)


def _check_some_finished(groups: Sequence[Group]) -> None:
    """Refuse attempts that all failed: their numbers would be those of a model that is always wrong, and say nothing about this one."""
    ended = [trajectory for group in groups for trajectory in group.trajectories]
    if any(attempt.status != "failed" for attempt in ended):
        return
    causes = Counter(attempt.cause for attempt in ended).most_common(_COMMON)
    raise RolloutError(
        f"all {len(ended)} attempts failed, so nothing was measured",
        remedy=name_remedy([failed.cause or "" for failed in ended]),
        details=[f"{count} x {cause}" for cause, count in causes],
    )
