"""The plan of a run as plain values: the answer to --dry-run."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.contracts.values.plan import BatchPlan
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.data.preview import first_prompt
from skyrl_engine.engine.batch_shape import BatchShape
from skyrl_engine.engine.cpu_check import describe_sharing
from skyrl_engine.engine.device_check import describe_compiling
from skyrl_engine.training.sft.checks import limit_to_model
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.training.sft.prepare import PreparedRun, describe_data
from skyrl_engine.training.sft.student_samples import is_sampled, samples_answers


@frozen
class MicroBatchShape:
    """One micro-batch of one data-parallel rank: dense `rows` x `width` tokens, for `samples` samples."""

    rank: int
    rows: int
    width: int
    samples: int


@frozen
class RunPlan:
    """`plugins` describe each selected plugin by kind; `train` and `evaluation` are the data's name, format and counts.

    `sharing` says how many ranks share how many cores of this machine, if they do.
    `adapters` counts the matrices that LoRA adapts and those that it leaves frozen. `compiles` says what the first step does once, where it
    compiles; else it is empty.
    `longest_allowed` is the longest sample in tokens, by `data.max_length` or else by the model; None where neither says. `rotary_length` is
    the longest row for which rotary frequencies are fixed; None for models that do not choose them by length.
    `samples_per_step` says how many samples a step trains on where that is not `batch_size`; else it is empty.
    `sampled` says how many steps train on the student's own answers; None where none does.
    `micro_batches` and `shape` are those of the run's first mini-batch. `chosen` says what the engine chose where the configuration says
    "auto", and why. `prompt` is the first prompt of the training data as pieces of text, a token each.
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
    steps_per_epoch: int
    batch_size: int
    samples_per_step: str
    sampled: str | None
    micro_batches: tuple[MicroBatchShape, ...]
    shape: BatchShape
    chosen: tuple[str, ...]
    prompt: tuple[str, ...]


def describe_plan(prepared: PreparedRun) -> RunPlan:
    """The plan of a prepared run."""
    resolved = prepared.resolved
    return RunPlan(
        plugins={kind: _describe(selected) for kind, selected in resolved.plugins.items()},
        observers=tuple(_describe(selected) for selected in resolved.observers),
        model=resolved.config.model.path,
        launch=resolved.config.run.launch,
        sharing=describe_sharing(resolved.config.run),
        topology=prepared.assembly.description.topology,
        adapters=_adapters(resolved),
        compiles=describe_compiling(resolved.config.model),
        capabilities=tuple(sorted(prepared.assembly.description.capabilities)),
        required=tuple(sorted(prepared.required)),
        train=describe_data(prepared.train) or {},
        evaluation=describe_data(prepared.evaluation),
        longest_allowed=limit_to_model(resolved.config.data, prepared.files.facts).max_length,
        rotary_length=prepared.files.facts.rotary_length,
        total_steps=prepared.total_steps,
        steps_per_epoch=prepared.order.steps_per_epoch,
        batch_size=prepared.order.batch_size,
        samples_per_step=samples_per_step(prepared.order),
        sampled=_count_sampled_steps(prepared),
        micro_batches=_shapes(prepared.first_batch),
        shape=prepared.first_shape,
        chosen=tuple(str(choice) for choice in prepared.choices),
        prompt=first_prompt(prepared.train, prepared.files.tokenizer),
    )


def samples_per_step(order: SampleOrder) -> str:
    """Say how many samples the steps train on that are not full mini-batches; empty where all are full."""
    rest = order.samples % order.batch_size
    if order.samples < order.batch_size:
        return f"the data has {order.samples} samples, so every step trains on {order.samples}"
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
