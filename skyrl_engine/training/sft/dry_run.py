"""The plan of a run as plain values: the answer to --dry-run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.automatic import budget_of
from skyrl_engine.contracts.values.plan import BatchPlan
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.data.preview import first_prompt
from skyrl_engine.engine.batch_shape import BatchShape
from skyrl_engine.engine.cpu_check import describe_sharing
from skyrl_engine.engine.device_check import describe_compiling
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.memory_plan import MemoryPlan, plan_memory
from skyrl_engine.training.planned_batches import find_heavy_batches
from skyrl_engine.training.planned_sampling import plan_sampling
from skyrl_engine.training.sft.checks import limit_to_model
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.training.sft.prepare import PreparedRun, describe_data
from skyrl_engine.training.sft.student_samples import is_sampled, samples_answers
from skyrl_engine.workers.dispatch import plan_batch


@frozen
class MicroBatchShape:
    """One micro-batch of one data-parallel rank: dense `rows` x `width` tokens, for `samples` samples."""

    rank: int
    rows: int
    width: int
    samples: int


@frozen
class RunPlan:
    """`plugins` describe each selected plugin by kind; `train` and `evaluation` are the data's name, format and counts;
    `train["assumed"]` says that lengths stand in the place of the data.

    `sharing` says how many ranks share how many cores of this machine, if they do.
    `adapters` counts the matrices that LoRA adapts and those that it leaves frozen. `compiles` says what the first step does once, where it
    compiles; else it is empty.
    `longest_allowed` is the longest sample in tokens, by `data.max_length` or else by the model; None where neither says. `rotary_length` is
    the longest row for which rotary frequencies are fixed; None for models that do not choose them by length.
    `samples_per_step` says how many samples a step trains on where that is not `batch_size`; else it is empty.
    `mixture` says how many draws of an epoch are from each dataset, where these have weights; else it is empty.
    `sampled` says how many steps train on the student's own answers; None where none does.
    `micro_batches` and `shape` are those of the run's first mini-batch. `chosen` says what the engine chose where the configuration says
    "auto", and why. `prompt` is the first prompt of the training data as pieces of text, a token each. `memory` is that of the heaviest step;
    None where the model's configuration does not tell its shape.
    """

    plugins: Mapping[str, str]
    observers: tuple[str, ...]
    model: str
    launch: str
    sharing: str | None
    topology: Topology
    adapters: str | None
    compiles: str
    capabilities: tuple[str, ...]
    required: tuple[str, ...]
    train: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    longest_allowed: int | None
    rotary_length: int | None
    total_steps: int
    steps_per_epoch: int | None
    batch_size: int
    samples_per_step: str
    mixture: str
    sampled: str | None
    micro_batches: tuple[MicroBatchShape, ...]
    shape: BatchShape
    chosen: tuple[str, ...]
    prompt: tuple[str, ...]
    memory: MemoryPlan | None


def describe_plan(prepared: PreparedRun, frozen: Sequence[FrozenModel] = ()) -> RunPlan:
    """The plan of a prepared run, with the `frozen` models that its trainer sets up beside the trained one and its teacher."""
    resolved = prepared.resolved
    assumed = resolved.assumed.lengths is not None
    return RunPlan(
        plugins={kind: _describe(selected) for kind, selected in resolved.plugins.items()},
        observers=tuple(_describe(selected) for selected in resolved.observers),
        model=resolved.config.model.path,
        launch=resolved.config.run.launch,
        sharing=None if resolved.assumed.device_bytes is not None else describe_sharing(resolved.config.run),
        topology=prepared.assembly.description.topology,
        adapters=_adapters(resolved),
        compiles=describe_compiling(resolved.config.model),
        capabilities=tuple(sorted(prepared.assembly.description.capabilities)),
        required=tuple(sorted(prepared.required)),
        train={**(describe_data(prepared.train, prepared.stream) or {}), **({"assumed": True} if assumed else {})},
        evaluation=describe_data(prepared.evaluation),
        longest_allowed=limit_to_model(resolved.config.data, prepared.files.facts).max_length,
        rotary_length=prepared.files.facts.rotary_length,
        total_steps=prepared.total_steps,
        steps_per_epoch=None if prepared.stream is not None else prepared.order.steps_per_epoch,
        batch_size=prepared.order.batch_size,
        samples_per_step="" if prepared.stream is not None else samples_per_step(prepared.order),
        mixture="" if prepared.order.mixture is None else str(prepared.order.mixture),
        sampled=_count_sampled_steps(prepared),
        micro_batches=_shapes(prepared.first_batch),
        shape=prepared.first_shape,
        chosen=tuple(str(choice) for choice in prepared.choices),
        prompt=() if assumed else first_prompt(prepared.train, prepared.files.tokenizer),
        memory=_plan_memory(prepared, frozen),
    )


def samples_per_step(order: SampleOrder) -> str:
    """Say how many samples the steps train on that are not full mini-batches; empty where all are full."""
    rest = order.samples % order.batch_size
    if order.samples < order.batch_size:
        return f"an epoch has {order.samples} samples, so every step trains on {order.samples}"
    if not rest:
        return ""
    if order.drop_last:
        return f"{order.left_out} samples at the end of an epoch are left out"
    return f"about {rest} samples in the last of an epoch" if order.bundles else f"{rest} samples in the last of an epoch"


def _count_sampled_steps(prepared: PreparedRun) -> str | None:
    config = prepared.resolved.config
    if not samples_answers(prepared.resolved):
        return None
    drawn = sum(is_sampled(config.run.seed, step, config.sampling.share) for step in range(1, prepared.total_steps + 1))
    return (
        f"{drawn:,} of {prepared.total_steps:,} train on the student's own answers, of up to {config.sampling.max_tokens:,} tokens"
    )


def _adapters(resolved: ResolvedConfig) -> str | None:
    """Count what LoRA adapts in a model without values. Raises ModelError for targets that the model does not have."""
    model = resolved.config.model
    if model.lora is None:
        return None
    from skyrl_engine.modeling.loading import load_skeleton
    from skyrl_engine.modeling.lora import describe_adapters
    from skyrl_engine.modeling.vision import language_part

    _, scorer = load_skeleton(model, images=True)
    return describe_adapters(language_part(scorer.decoder))


def _shapes(plan: BatchPlan) -> tuple[MicroBatchShape, ...]:
    return tuple(
        MicroBatchShape(rank, batch.rows, batch.width, len(batch.samples))
        for mini_batch in plan.mini_batches
        for rank, micro_batches in enumerate(mini_batch.ranks)
        for batch in micro_batches
    )


def _describe(selected: SelectedPlugin) -> str:
    record = selected.loaded.record
    return f"{record.reference} {record.version or record.sha256}"


def _plan_memory(prepared: PreparedRun, frozen: Sequence[FrozenModel]) -> MemoryPlan | None:
    """Plan the step that takes most memory: of the first epoch's mini-batches, those with most tokens and with the longest sample are tried."""
    resolved, columns, training = prepared.resolved, prepared.train.columns, prepared.resolved.config.training
    models = [*frozen, *([] if prepared.teacher is None else [prepared.teacher])]
    beside = {each.name: each.model for each in models if each.model is not None}
    sampling = plan_sampling(resolved, prepared.assembly) if samples_answers(resolved) else None
    layout = prepared.assembly.layout(micro_batch_rows=training.micro_batch_rows, micro_batch_tokens=budget_of(training))
    of_tokens, of_actions = np.diff(columns.token_offsets), np.diff(columns.action_offsets)
    plans = [
        (plan_batch(prepared.assembly.collator, prepared.train.take(chosen), layout), of_tokens[chosen], of_actions[chosen])
        for chosen in find_heavy_batches(_list_first_epoch(prepared), of_tokens)
    ]
    planned = [
        plan_memory(resolved, prepared.assembly, cut, tokens=tokens, actions=actions, beside=beside, sampling=sampling)
        for cut, tokens, actions in plans
    ]
    return max((plan for plan in planned if plan is not None), key=lambda plan: plan.most.total, default=None)


def _list_first_epoch(prepared: PreparedRun) -> Iterator[IntArray]:
    """Yield the samples of the mini-batches of the run's first epoch; of data that are read while training, of the first alone."""
    order, position = prepared.order, prepared.order.start()
    steps = 1 if prepared.stream is not None else min(prepared.total_steps, order.steps_per_epoch)
    for _ in range(steps):
        chosen, position = order.mini_batch(position)
        yield chosen
