"""Everything of a supervised run that can be decided before a rank starts: data, plugins on the controller, layout, steps, checks."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import DataConfig, EngineConfig
from skyrl_engine.contracts.kinds.backend import BackendDescription, Capability
from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.merger import Merger
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import BatchPlan, Layout
from skyrl_engine.data.dataset import Split, TokenizedDataset, load_columns
from skyrl_engine.data.images.processor import Vision, load_vision
from skyrl_engine.engine.capability import (
    check_capabilities,
    check_carried,
    check_layout,
    check_model,
    check_reducer,
    check_scores,
    needed_columns,
    required_capabilities,
    vision_of,
)
from skyrl_engine.engine.step import StepDriver
from skyrl_engine.errors import DataError
from skyrl_engine.model_facts.context_length import limited_to_model
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.workers.dispatch import batch_structure, planned, token_weights
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DataProgress = Callable[[str, int, int], None]
"""Told what is being read, how much of it is done, and how much there is."""


@frozen(eq=False)
class PreparedRun:
    """A run that is ready to start its ranks. `first_batch` is the plan of the run's first mini-batch, for --dry-run to show."""

    resolved: ResolvedConfig
    tokenizer: "PreTrainedTokenizerBase"
    vision: Vision
    train: TokenizedDataset
    evaluation: TokenizedDataset | None
    context: FactoryContext
    collator: Collator
    reducer: Reducer
    merger: Merger
    objective: ObjectiveParts
    description: BackendDescription
    required: frozenset[Capability]
    layout: Layout
    order: SampleOrder
    total_steps: int
    first_batch: BatchPlan = field(repr=False)

    def worker_spec(self) -> WorkerSpec:
        """What every rank is told at its start."""
        config = self.resolved.config
        return WorkerSpec(
            plugins={kind: selected.lock() for kind, selected in self.resolved.plugins.items()},
            context=self.context,
            model=attrs.evolve(config.model.spec(config.run.seed), packed_rows="packed" in self.required),
            optimizer=config.optimizer.spec(self.total_steps),
            topology=self.description.topology,
            device=config.run.device,
        )

    def driver(self, group: WorkerGroup) -> StepDriver:
        """Steps over these ranks."""
        return StepDriver(
            group=group,
            collator=self.collator,
            reducer=self.reducer,
            merger=self.merger,
            layout=self.layout,
            max_sequence_length=self.context.max_sequence_length,
            needs=self.objective.columns,
            labels={kind: str(selected.loaded.record) for kind, selected in self.resolved.plugins.items()},
        )


def prepare(resolved: ResolvedConfig, progress: DataProgress | None = None) -> PreparedRun:
    """Load the data, make the controller's plugins, and refuse what cannot work. Starts nothing and writes nothing but the token cache."""
    config = resolved.config
    plugins = resolved.plugins
    name = {kind: selected.loaded.record.name for kind, selected in plugins.items()}
    description = plugins["backend"].loaded.describe_backend(plugins["backend"].options, config.run.ranks)
    check_model(config.model, description)

    tokenizer = load_tokenizer(config.model)
    context = _context(config, tokenizer)
    parts = ObjectiveParts.made(plugins, context)
    for term in parts.losses:
        check_reducer(term.label, term.loss, name["reducer"])
    for label, needs in parts.needs.items():
        check_scores(label, needs, value_head=config.model.value_head)

    collator: Collator = plugins["collator"].make(context)
    topology, model = description.topology, config.model
    required_by = partial(required_capabilities, topology, collator, value_head=model.value_head, lora=model.lora is not None)
    check_capabilities(name["backend"], description.capabilities, required_by(()))  # now, because reading data may take hours
    check_layout(str(plugins["backend"].loaded.record), model, description)

    data = limited_to_model(config.data, model)
    needed = needed_columns(parts.needs)

    vision = vision_of(model, load_vision(model, data))

    def loaded(split: Split) -> TokenizedDataset:
        return load_columns(data, tokenizer, split=split, seed=config.run.seed, needed=needed, vision=vision, progress=progress)

    train = loaded("train")
    evaluation = loaded("eval") if _holds_out(data) else None
    _refuse_nothing_to_learn(train.columns)

    layout = config.training.layout(dp=topology.dp, tp=topology.tp, cp=topology.cp, pp=topology.pp)
    size = config.training.batch_size
    order = SampleOrder.of(train.columns, batch_size=size, seed=config.run.seed, shuffle=config.training.shuffle)
    if evaluation is not None:
        SampleOrder.of(evaluation.columns, batch_size=size)  # a group that fits no mini-batch is refused now, not after hours
    chosen, _ = order.mini_batch(order.start())
    first = train.columns.take(chosen)
    first_batch = planned(str(plugins["collator"].loaded.record), collator, first, layout)
    reducer: Reducer = plugins["reducer"].make(context)
    structure = batch_structure(first, first_batch.mini_batches[0], context.max_sequence_length)
    token_weights(str(plugins["reducer"].loaded.record), reducer, structure)  # one that cannot weigh this data is refused now
    datasets = [dataset.columns for dataset in (train, evaluation) if dataset is not None]
    check_carried(name["collator"], collator, datasets)
    required = required_by(datasets)
    check_capabilities(name["backend"], description.capabilities, required)
    return PreparedRun(
        resolved=resolved,
        tokenizer=tokenizer,
        vision=vision,
        train=train,
        evaluation=evaluation,
        context=context,
        collator=collator,
        reducer=reducer,
        merger=plugins["merger"].make(context),
        objective=parts,
        description=description,
        required=required,
        layout=layout,
        order=order,
        total_steps=config.training.steps or order.steps_in(config.training.epochs or 1.0),
        first_batch=first_batch,
    )


def columns_to_read(resolved: ResolvedConfig, tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """The columns that the objective needs of the data, each with who asks for it, as `load_columns` takes them."""
    return needed_columns(ObjectiveParts.made(resolved.plugins, _context(resolved.config, tokenizer)).needs)


def _context(config: EngineConfig, tokenizer: "PreTrainedTokenizerBase") -> FactoryContext:
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int), "load_tokenizer sees to a padding token"
    return FactoryContext(seed=config.run.seed, pad_token_id=pad, max_sequence_length=config.data.max_length)


def describe_data(dataset: TokenizedDataset | None) -> dict[str, Any] | None:
    """A dataset's name, format, further columns and counts as plain values."""
    if dataset is None:
        return None
    columns = sorted(dataset.columns.columns)
    return {"name": dataset.name, "format": dataset.format, "columns": columns, **attrs.asdict(dataset.counts)}


def _holds_out(data: DataConfig) -> bool:
    return data.eval is not None or data.eval_fraction > 0


def _refuse_nothing_to_learn(columns: SampleColumns) -> None:
    if len(columns) == 0:
        raise DataError("the training data holds no sample", remedy="Check data.train, data.max_length and data.overlong")
    if not columns.loss_weight.any():
        raise DataError(
            "no token of the training data carries loss",
            remedy="Check data.format and data.loss_on with `skyrl-engine data preview`",
        )
