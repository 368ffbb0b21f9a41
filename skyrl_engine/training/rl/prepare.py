"""Build a run by reinforcement up to the start of its ranks: check the configuration, build each part, check what was built, in that order."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.automatic import find_prompt_limit
from skyrl_engine.config.reading.origins import format_key, nearest
from skyrl_engine.config.reading.places import absent_places
from skyrl_engine.config.schema import EngineConfig
from skyrl_engine.contracts.kinds.environment import Environment
from skyrl_engine.contracts.kinds.needs import is_aligned
from skyrl_engine.contracts.values.rollout_columns import list_further_columns
from skyrl_engine.contracts.values.source_names import make_distinct
from skyrl_engine.data.text.template_rule import uses_template
from skyrl_engine.engine.assembly import assemble
from skyrl_engine.engine.automatic import Choices, align_for
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.engine.schedule import load_own_schedule
from skyrl_engine.errors import ConfigError, Problem, Refusals
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.offline_source import Recording, RecordingLimits, read_recording
from skyrl_engine.training.frozen_model_compat import check_models_beside
from skyrl_engine.training.reference import plan_reference
from skyrl_engine.training.rl.checks import AFTER_BUILDING, BEFORE_BUILDING, warn_of_settings
from skyrl_engine.training.rl.prepared import LiveRolloutSpec, PreparedRl, RlDraft
from skyrl_engine.training.rl.reward_model import plan_reward_models
from skyrl_engine.training.rl.scoring import LogprobsAvailability, plan_scoring_passes
from skyrl_engine.training.rl.tasks import TaskOrder, refuse_no_task, tasks_in
from skyrl_engine.training.teacher import plan_endpoint, plan_teacher

Progress = Callable[[str, int, int], None]
"""Called with what is being waited for, how much of it is there, and how much is wanted."""

_LOGPROBS: Final[Mapping[bool, LogprobsAvailability]] = {True: "with_logprobs", False: "without_logprobs"}


def prepare(resolved: ResolvedConfig, *, trains: bool = True, progress: Progress | None = None) -> PreparedRl:
    """Make the controller's plugins and tasks, or read a recording, and refuse what cannot work. Starts nothing and writes nothing.

    A run that only evaluates (`trains` is false) is not asked for what training alone needs.

    Raises ConfigError, UnsupportedError, DataError, ModelError, RolloutError, and what plugins raise; several of them as one that names all.
    """
    choices, refusals = Choices(resolved), Refusals()
    choices.choose_dtype()
    files = ModelFiles.of(choices.resolved.config.model)
    choices.choose_max_prompt_tokens(files.facts)
    draft = RlDraft(choices.resolved, files, trains, choices=choices)
    refusals.collect_all(BEFORE_BUILDING, draft)
    check_models_beside(draft.resolved, refusals)
    _build(draft, refusals, progress)
    refusals.collect_all(AFTER_BUILDING, draft)
    refusals.raise_all()
    warn_of_settings(draft)
    return _finish(draft)


def _build(draft: RlDraft, refusals: Refusals, progress: Progress | None) -> None:
    """Build each part of the draft whose own parts are there."""
    with refusals.collect():
        draft.assembly = assemble(draft.resolved, draft.files, max_sequence_length=draft.longest, loads=draft.loads)
        draft.assembly.check_data(draft.files.facts, [])
    if draft.is_live:
        _build_environments(draft, refusals)
    with refusals.collect():
        if not draft.has_pairs:
            draft.advantage = draft.resolved.plugins["advantage"].bind("advantage", draft.context)
    for number, selected in enumerate(draft.selected("group_filters")):
        with refusals.collect():
            draft.filters.append(selected.bind(f"group_filters[{number}]", draft.context))
    with refusals.collect():
        draft.rollouts = _build_live(draft) if draft.is_live else _read_recording(draft, progress)
    if draft.trains:
        with refusals.collect():
            load_own_schedule(draft.resolved.config.optimizer, draft.resolved.config.rl.steps)
    with refusals.collect():
        _choose_layout(draft)
    with refusals.collect():
        _build_scoring(draft)
    for build in (_build_reference, _build_teacher, _build_reward_models):
        with refusals.collect():
            build(draft)


def _finish(draft: RlDraft) -> PreparedRl:
    """Return the whole of a draft that was not refused."""
    assembly, advantage, rollouts, scoring = draft.assembly, draft.advantage, draft.rollouts, draft.scoring
    assert assembly is not None, "what hinders it was raised"
    assert advantage is not None or draft.has_pairs, "what hinders it was raised"
    assert rollouts is not None, "what hinders it was raised"
    assert scoring is not None, "what hinders it was raised"
    environments = draft.selected("environments")
    return PreparedRl(
        resolved=draft.resolved,
        files=draft.files,
        assembly=assembly,
        layout=draft.layout_of(assembly),
        advantage=advantage,
        filters=tuple(draft.filters),
        environments=environments,
        names=rollouts.names if isinstance(rollouts, Recording) else _names(environments),
        rollouts=rollouts,
        scoring=scoring,
        reference=draft.reference,
        teacher=draft.teacher,
        endpoint=draft.endpoint,
        reward_models=draft.reward_models,
        loads=draft.loads,
        choices=tuple(draft.choices.made),
    )


def _choose_layout(draft: RlDraft) -> None:
    """Choose collator and token budget, where the configuration leaves them open."""
    if draft.assembly is None:
        return
    if not draft.loads:
        draft.choices.need_no_micro_batches()
        draft.resolved = draft.choices.resolved
        return
    choices, settings, assembly = draft.choices, draft.resolved.config.rl, draft.assembly
    size, longest = settings.group_size, draft.longest
    if isinstance(draft.rollouts, Recording):
        size, longest = draft.rollouts.largest, max(longest, draft.rollouts.longest)
    if assembly.collators is not None:
        alone = size == 1 and settings.history == "append"
        unpaid = "rl.group_size = 1, so that no attempts share a prompt" if alone else None
        if any(map(is_aligned, assembly.objective.scores)):
            unpaid = "a teacher with another tokenizer reads the texts of whole samples"
        draft.assembly = assembly.with_collator(choices.choose_collator(assembly.collators, unpaid=unpaid))
    alignment = align_for(assembly.description.topology)
    shares = draft.assembly.collator.product.rows == "tree"
    together = 1
    if settings.pairs is not None:
        # the halves of a pair share a micro-batch
        size, together = min(size, 2 * settings.pairs), 2
    choices.choose_micro_batch_tokens(
        draft.files.facts,
        assembly.description,
        largest=together * -(-longest // alignment) * alignment,
        batch_local=assembly.batch_local,
        shared=find_prompt_limit(settings) + size * settings.max_tokens if shares else 0,
    )
    draft.resolved = choices.resolved


def _build_environments(draft: RlDraft, refusals: Refusals) -> None:
    """Make the environments and read their tasks, each on its own; those that cannot are left out."""
    for number, selected in enumerate(draft.selected("environments")):
        count = len(draft.environments)
        with refusals.collect():
            environment: BoundPlugin[Environment] = selected.bind(f"environments[{number}]", draft.context)
            refuse_no_task(environment, tasks_in(environment, "train"), trains=draft.trains)
            draft.environments.append(environment)
        if len(draft.environments) == count:
            _refuse_absent_places(draft.resolved, selected, number, refusals)


def _refuse_absent_places(resolved: ResolvedConfig, environment: SelectedPlugin, number: int, refusals: Refusals) -> None:
    """Collect the files of an environment that are not there: making it stops at the first."""
    if environment.options is None:
        return
    for key, place in absent_places(type(environment.options), environment.options, ("environments", number)):
        with refusals.collect():
            if not refusals.has_named(place):
                raise ConfigError(
                    [
                        Problem(
                            f"{nearest(resolved.origins, key)}: {format_key(key)}",
                            f"there is nothing at {place}",
                            "Correct the path",
                        )
                    ]
                )


def _build_live(draft: RlDraft) -> LiveRolloutSpec | None:
    """Order the tasks of all environments; None where one of them could not be made."""
    config = draft.resolved.config
    if not draft.environments or len(draft.environments) < len(config.environments):
        return None
    tasks = TaskOrder(draft.environments, [table.weight for table in config.environments], config.run.seed, trains=draft.trains)
    template = config.model.chat_template
    named: dict[str, Any] = {} if template is None else {"name": f"the chat template {template}"}
    raw = not uses_template(draft.files.tokenizer, config.rl.template)
    return LiveRolloutSpec(tasks, ChatRenderer(draft.files.tokenizer, history=config.rl.history, raw=raw, **named))


def _read_recording(draft: RlDraft, progress: Progress | None) -> Recording:
    config, facts = draft.resolved.config, draft.files.facts
    assert config.rl.rollouts is not None, "that is why it is read"
    return read_recording(
        Path(config.rl.rollouts).expanduser(),
        RecordingLimits(facts.vocabulary_size, facts.extended_length, config.rollouts.fewest_finished),
        draft.filters,
        max_drop_share=config.rollouts.max_drop_share,
        on_starved=config.rollouts.on_starved,
        on_progress=None if progress is None else lambda groups: progress("groups that are read", groups, groups),
    )


def _build_scoring(draft: RlDraft) -> None:
    """Choose the passes of every step."""
    if draft.assembly is None or (draft.advantage is None and not draft.has_pairs):
        return
    recorded = _LOGPROBS[draft.rollouts.has_logprobs] if isinstance(draft.rollouts, Recording) else None
    draft.scoring = plan_scoring_passes(
        draft.resolved.config.rl,
        draft.assembly.objective,
        draft.advantage,
        recorded=recorded,
        reducer=draft.assembly.reducer,
        of_rollouts=_list_columns_of_rollouts(draft),
    )


def _list_columns_of_rollouts(draft: RlDraft) -> frozenset[str]:
    """Return the further columns that every attempt of the run will have."""
    if isinstance(draft.rollouts, Recording):
        return draft.rollouts.columns
    claimed = [frozenset(environment.product.claims.columns) for environment in draft.environments]
    rows = list_further_columns() if claimed else ()
    return frozenset(row.column for row in rows if all(row.name in names for names in claimed))


def _build_reference(draft: RlDraft) -> None:
    if draft.assembly is not None and draft.scoring is not None and draft.scoring.reference:
        draft.reference = plan_reference(draft.resolved, draft.assembly, draft.files)


def _build_teacher(draft: RlDraft) -> None:
    if draft.assembly is not None and draft.scoring is not None:
        draft.teacher = plan_teacher(
            draft.resolved,
            draft.assembly,
            draft.files,
            read=draft.scoring.teacher,
            longest=draft.longest,
            shorter="Lower rl.max_prompt_tokens or rl.max_tokens",
        )
        draft.endpoint = plan_endpoint(draft.resolved, draft.files)
        _refuse_other_numbers(draft.resolved.config)


def _refuse_other_numbers(config: EngineConfig) -> None:
    """Refuse a server that would be asked for other numbers than this trainer reads. Raises ConfigError."""
    problems = []
    if config.teacher.url is not None and config.rl.temperature != 1:
        problems.append(
            Problem(
                "rl.temperature",
                f"is {config.rl.temperature:g}, and a server tells log-probabilities at 1",
                "Set it to 1, or teacher.path",
            )
        )
    if config.teacher.top_k is not None:
        problems.append(
            Problem("teacher.top_k", "is set, and trainer rl reads the log-probability of the sampled token alone", "Remove it")
        )
    if problems:
        raise ConfigError(problems)


def _build_reward_models(draft: RlDraft) -> None:
    if draft.assembly is not None:
        draft.reward_models = plan_reward_models(draft.resolved, draft.assembly, draft.files)


def _names(environments: Sequence[SelectedPlugin]) -> tuple[str, ...]:
    """Name environments after their plugins; of several of one plugin each has its number."""
    return make_distinct([environment.loaded.record.name for environment in environments])
