"""The plan of a run by reinforcement as plain values: the answer to --dry-run."""

from collections.abc import Mapping
from typing import cast

import numpy as np
from attrs import asdict, evolve, frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.automatic import find_attempt_limit
from skyrl_engine.config.schema import GeneratorTable, RlConfig
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.data.preview import show_boundaries, token_texts
from skyrl_engine.data.text.template_rule import Rendering
from skyrl_engine.engine.cpu_check import describe_sharing
from skyrl_engine.engine.device_check import describe_compiling
from skyrl_engine.engine.generator_placement import choose_placement, count_replicas
from skyrl_engine.engine.memory_plan import MemoryPlan, format_memory_plan, plan_memory
from skyrl_engine.model_facts.memory import CACHE_SHARE, CacheShape, format_bytes
from skyrl_engine.rollout.offline_source import Recording
from skyrl_engine.run.session import recall_choices
from skyrl_engine.training.planned_batches import cut_batches, find_heavy_batches, lengths_of
from skyrl_engine.training.planned_sampling import plan_sampling
from skyrl_engine.training.rl.batches import mini_batch_size
from skyrl_engine.training.rl.prepare import Progress, prepare
from skyrl_engine.training.rl.prepared import LiveRolloutSpec, PreparedRl
from skyrl_engine.training.rl.tasks import tasks_in
from skyrl_engine.workers.dispatch import plan_lengths


@frozen
class RlPlan:
    """The plan of a run, for `--dry-run`. `plugins` describe each selected plugin by its place in the configuration.

    `rollouts` describes a recording that is trained on, None where attempts are sampled. `passes` names the passes over a batch in their order.
    `sampling` says where attempts are sampled, and what goes on beside it, None where none are. `caches` says what the generator holds of
    keys and values on each rank, None where it does not say. `compiles` says what the first step does once, where it compiles; else it is
    empty. `written` says who writes prompts, empty for a recording. `prompt` is the first prompt of every environment as pieces of text, a
    token each; `suffix` is what comes between a turn and the next one, where there are several turns. `chosen` says what the engine chose
    where the configuration says "auto", and why. `memory` is that of a step whose attempts are as long as they may be, or as assumed; None
    where the model's configuration does not tell its shape.
    """

    plugins: Mapping[str, str]
    observers: tuple[str, ...]
    model: str
    launch: str
    sharing: str | None
    topology: Topology
    capabilities: tuple[str, ...]
    tasks: Mapping[str, tuple[int, int]]
    rollouts: str | None
    steps: int
    batch: str
    passes: tuple[str, ...]
    reference: str | None
    sampling: str | None
    caches: str | None
    compiles: str
    written: str
    prompt: Mapping[str, tuple[str, ...]]
    suffix: Mapping[str, tuple[str, ...]]
    chosen: tuple[str, ...]
    memory: MemoryPlan | None


def plan_rl(resolved: ResolvedConfig, *, progress: Progress | None = None) -> RlPlan:
    """Do everything up to starting ranks and environments, and say what the run would do. Writes no run directory."""
    prepared = prepare(recall_choices(resolved), progress=progress)
    resolved = prepared.resolved
    config = resolved.config
    return RlPlan(
        plugins={
            place: _describe(selected)
            for place, selected in resolved.plugins.items()
            if place != "generator" or isinstance(prepared.rollouts, LiveRolloutSpec)
        },
        observers=tuple(_describe(selected) for selected in resolved.observers),
        model=config.model.path,
        launch=config.run.launch,
        sharing=None if prepared.resolved.assumed.device_bytes is not None else describe_sharing(config.run),
        topology=prepared.assembly.description.topology,
        capabilities=tuple(sorted(prepared.assembly.description.capabilities)),
        tasks=_tasks(prepared),
        rollouts=_recording(prepared),
        steps=config.rl.steps,
        batch=_batch(config.rl, recorded=isinstance(prepared.rollouts, Recording)),
        passes=_passes(prepared),
        reference=_reference(prepared),
        sampling=_describe_sampling(prepared),
        caches=_describe_caches(prepared),
        compiles=describe_compiling(config.model),
        written=_format_first_prompt(prepared),
        prompt=_prompts(prepared),
        suffix=_suffixes(prepared),
        chosen=tuple(str(choice) for choice in prepared.choices),
        memory=_plan_memory(prepared),
    )


def _plan_memory(prepared: PreparedRl) -> MemoryPlan | None:
    resolved, assembly = prepared.resolved, prepared.assembly
    rl, rollouts = resolved.config.rl, prepared.rollouts
    size, longest = rl.group_size, prepared.longest
    if isinstance(rollouts, Recording):
        size, longest = rollouts.largest, rollouts.longest
    unit = 1 if rl.pairs is None else 2
    if rl.pairs is not None:
        size = unit * max(1, min(rl.pairs, size // unit))
    count = rl.groups * size
    steps = [np.full(count, longest, dtype=np.int64)]
    if resolved.assumed.lengths is not None:
        assumed = np.asarray(resolved.assumed.lengths, dtype=np.int64)
        heavy = find_heavy_batches(cut_batches(len(assumed), count, resolved.config.run.seed), assumed)
        steps = [assumed[chosen] for chosen in heavy]
    layout = evolve(prepared.layout, mini_batch_size=mini_batch_size([size] * rl.groups, rl.mini_batches))
    models = [prepared.reference, prepared.teacher, *(model.frozen for model in prepared.reward_models)]
    beside = {each.name: each.model for each in models if each is not None and each.model is not None}
    sampling = None if isinstance(rollouts, Recording) else plan_sampling(resolved, assembly, beside=rl.staleness > 0)
    plans = []
    for tokens in steps:
        actions = np.minimum(tokens, rl.max_tokens)
        cut = plan_lengths(assembly.collator, lengths_of(tokens, actions, unit=unit, group=size), layout)
        plans.append(plan_memory(resolved, assembly, cut, tokens=tokens, actions=actions, beside=beside, sampling=sampling))
    return max((plan for plan in plans if plan is not None), key=lambda plan: plan.most.total, default=None)


def _batch(rl: RlConfig, *, recorded: bool) -> str:
    attempts = "as many attempts as were recorded" if recorded else f"{rl.group_size} attempts"
    paired = ""
    if rl.pairs is not None:
        most = "a pair" if rl.pairs == 1 else f"up to {rl.pairs} pairs"
        paired = f" ({most} of each task whose rewards differ)"
    return f"{rl.groups} tasks x {attempts}{paired}, {rl.mini_batches} optimizer steps x {rl.epochs} epochs"


def _passes(prepared: PreparedRl) -> tuple[str, ...]:
    recipe = prepared.scoring
    scored = [f"score {score} as {column}" for column, score in recipe.scores.items()]
    reference = ["score logprobs of the reference as ref_logprobs"] if recipe.reference else []
    learning = "train" if recipe.old != "current" else "train (the policy is its own old one)"
    paired = ["choose pairs"] if prepared.resolved.config.rl.pairs is not None else []
    return ("read" if isinstance(prepared.rollouts, Recording) else "sample", *paired, *scored, *reference, learning)


def _reference(prepared: PreparedRl) -> str | None:
    if prepared.reference is None:
        return None
    model = prepared.reference.model
    return "the trained model without its adapters" if model is None else f"a second model, {model.path}"


def _describe_sampling(prepared: PreparedRl) -> str | None:
    """Say where generators live, and whether the ranks train meanwhile."""
    selected = prepared.resolved.plugins.get("generator")
    if selected is None or isinstance(prepared.rollouts, Recording):
        return None
    table = cast("GeneratorTable", prepared.resolved.config.selected["generator"])
    staleness = prepared.resolved.config.rl.staleness
    description = selected.loaded.describe_generator(selected.options)
    match choose_placement(str(selected.loaded.record), description, table, beside=staleness > 0):
        case "rank":
            return "on the ranks, in turns with training"
        case "process":
            count = count_replicas(table)
            place = "in a process of its own" if count == 1 else f"in {count} processes of their own"
            if table.launch == "ray":
                gpus = "a GPU where ranks have one" if table.gpus is None else f"{table.gpus:g} GPU"
                place += f" on the Ray cluster, {'each ' * (count > 1)}with {table.cpus:g} CPU and {gpus}"
        case _:
            place = "by servers"
    if not staleness:
        return f"{place}, in turns with training{', on the same devices' if table.share_devices else ''}"
    updates = (
        "new weights reach groups under way" if prepared.in_flight_updates else "an update waits until groups under way have ended"
    )
    order = "as they finish" if prepared.order == "finished" else "in the order of their start"
    age = "1 step" if staleness == 1 else f"{staleness} steps"
    return f"{place}, beside training, at most {age} old; {updates}; groups are trained {order}"


def _describe_caches(prepared: PreparedRl) -> str | None:
    """Say how many tokens' keys and values a rank holds, and what they and the longest attempt take."""
    selected = prepared.resolved.plugins.get("generator")
    if selected is None or isinstance(prepared.rollouts, Recording):
        return None
    tokens = selected.loaded.describe_generator(selected.options).cache_tokens
    config, rl = prepared.files.facts.config, prepared.resolved.config.rl
    shape = None if config is None else CacheShape.of(config)
    if tokens is None or shape is None:
        return None
    token_bytes = shape.token_bytes(prepared.resolved.config.model.dtype)
    longest = find_attempt_limit(rl)
    held = f"as many as {CACHE_SHARE:.0%} of the memory takes that is free on each rank"
    if tokens != "free":
        held = f"{tokens:,} tokens on each rank, {format_bytes(tokens * token_bytes)}"
    return f"{held}; {format_bytes(token_bytes)} a token, {format_bytes(longest * token_bytes)} an attempt of {longest:,}"


def _tasks(prepared: PreparedRl) -> Mapping[str, tuple[int, int]]:
    """Tasks to train on and held-out ones, by environment."""
    if isinstance(prepared.rollouts, Recording):
        return {}
    order = prepared.rollouts.tasks
    counts = (
        (len(env_tasks), len(tasks_in(part, "eval"))) for env_tasks, part in zip(order.tasks, order.environments, strict=True)
    )
    return dict(zip(prepared.names, counts, strict=True))


def _recording(prepared: PreparedRl) -> str | None:
    if not isinstance(prepared.rollouts, Recording):
        return None
    settings = prepared.resolved.config.rl
    passes = settings.steps * settings.groups / len(prepared.rollouts.groups)
    return f"{prepared.rollouts}; {settings.steps:,} steps of {settings.groups} groups are {passes:.1f} passes over them"


def _format_first_prompt(prepared: PreparedRl) -> str:
    if isinstance(prepared.rollouts, Recording):
        return ""
    if all(env_tasks[0].prompt_ids for env_tasks in prepared.rollouts.tasks.tasks):
        return str(Rendering("tokens"))
    return str(Rendering.of_prompts(prepared.files.tokenizer, prepared.resolved.config.rl.template))


def _prompts(prepared: PreparedRl) -> Mapping[str, tuple[str, ...]]:
    prompts = {}
    if isinstance(prepared.rollouts, Recording):
        first = prepared.rollouts.groups[0]()
        attempt = first.finished[0]
        return {first.environment: _pieces(prepared, attempt.token_ids[: attempt.segment_offsets[1]].tolist())}
    for name, env_tasks in zip(prepared.names, prepared.rollouts.tasks.tasks, strict=True):
        task = env_tasks[0]
        ids = list(task.prompt_ids) if task.prompt_ids else prepared.rollouts.renderer.prompt(task.messages, task.tools).tolist()
        prompts[name] = _pieces(prepared, ids)
    return prompts


def _suffixes(prepared: PreparedRl) -> Mapping[str, tuple[str, ...]]:
    suffixes: dict[str, tuple[str, ...]] = {}
    if isinstance(prepared.rollouts, Recording):
        return suffixes
    order, renderer = prepared.rollouts.tasks, prepared.rollouts.renderer
    for name, part, env_tasks in zip(prepared.names, order.environments, order.tasks, strict=True):
        if part.product.claims.max_turns > 1 and renderer.history == "append":
            tools = env_tasks[0].tools
            observation = (
                {"role": "tool", "name": "tool", "content": "an answer"} if tools else {"role": "user", "content": "an answer"}
            )
            suffixes[name] = _pieces(prepared, renderer.suffix((observation,), None, tools).tolist())
    return suffixes


def _pieces(prepared: PreparedRl, ids: list[int]) -> tuple[str, ...]:
    return tuple(token_texts(prepared.files.tokenizer, ids))


def _describe(selected: SelectedPlugin) -> str:
    record = selected.loaded.record
    return f"{record.reference} {record.version or record.sha256}"


def facts(plan: RlPlan) -> dict[str, str]:
    """Return the plan in lines, by what each is about."""
    sizes = ", ".join(f"{name} {size}" for name, size in asdict(plan.topology).items())
    shared = f"; {plan.sharing}" if plan.sharing else ""
    return {
        **plan.plugins,
        "observers": ", ".join(plan.observers) or "none",
        "model": plan.model,
        "launch": f"{plan.launch}, world of {plan.topology.world_size} ({sizes}){shared}",
        **({} if plan.reference is None else {"reference": plan.reference}),
        **({} if plan.sampling is None else {"sampling": plan.sampling}),
        **({} if plan.caches is None else {"keys and values": plan.caches}),
        **({"compiling": plan.compiles} if plan.compiles else {}),
        **{f"tasks of {name}": f"{train:,} to train on, {held_out:,} held out" for name, (train, held_out) in plan.tasks.items()},
        **({} if plan.rollouts is None else {"rollouts": plan.rollouts}),
        "steps": f"{plan.steps:,} of {plan.batch}",
        "passes": ", ".join(plan.passes),
        **({"chosen": "\n".join(plan.chosen)} if plan.chosen else {}),
        **({} if plan.memory is None else format_memory_plan(plan.memory)),
        **({"prompts": f"written {plan.written}"} if plan.written else {}),
        **{f"first prompt of {name}": show_boundaries(pieces) for name, pieces in plan.prompt.items()},
        **{f"between turns of {name}": show_boundaries(pieces) for name, pieces in plan.suffix.items()},
    }
