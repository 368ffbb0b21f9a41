"""Everything of a supervised run that can be decided before a rank starts: data, plugins on the controller, layout, steps, checks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import DataConfig
from skyrl_engine.contracts.backend import BackendDescription, Capability
from skyrl_engine.contracts.collator import Collator
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.context import FactoryContext
from skyrl_engine.contracts.loss import Loss
from skyrl_engine.contracts.merger import Merger
from skyrl_engine.contracts.plan import BatchPlan, Layout
from skyrl_engine.contracts.reducer import Reducer
from skyrl_engine.data.context_length import limited_to_model
from skyrl_engine.data.dataset import TokenizedDataset, load_columns
from skyrl_engine.data.tokenizer import load_tokenizer
from skyrl_engine.errors import DataError
from skyrl_engine.training.capability import (
    check_capabilities,
    check_loss,
    check_ungrouped,
    required_capabilities,
)
from skyrl_engine.training.order import SampleOrder
from skyrl_engine.training.step import StepDriver
from skyrl_engine.workers.dispatch import planned
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
    train: TokenizedDataset
    evaluation: TokenizedDataset | None
    context: FactoryContext
    collator: Collator
    reducer: Reducer
    merger: Merger
    loss: Loss
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
            model=attrs.evolve(config.model.spec(), packed_rows="packed" in self.required),
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
            needs=self.loss.needs,
            labels={kind: str(selected.loaded.record) for kind, selected in self.resolved.plugins.items()},
        )


def prepare(resolved: ResolvedConfig, progress: DataProgress | None = None) -> PreparedRun:
    """Load the data, make the controller's plugins, and refuse what cannot work. Starts nothing and writes nothing but the token cache."""
    config = resolved.config
    plugins = resolved.plugins
    name = {kind: selected.loaded.record.name for kind, selected in plugins.items()}
    description = plugins["backend"].loaded.describe_backend(plugins["backend"].options, config.run.ranks)

    tokenizer = load_tokenizer(config.model)
    data = limited_to_model(config.data, config.model)
    train = load_columns(data, tokenizer, split="train", seed=config.run.seed, progress=progress)
    evaluation = load_columns(data, tokenizer, split="eval", seed=config.run.seed, progress=progress) if _holds_out(data) else None
    _refuse_nothing_to_learn(train.columns)
    check_ungrouped(train.columns)

    context = FactoryContext(
        seed=config.run.seed, pad_token_id=int(tokenizer.pad_token_id), max_sequence_length=config.data.max_length
    )
    loss: Loss = plugins["loss"].make(context)
    for dataset in (train, evaluation):
        if dataset is not None:
            check_loss(name["loss"], loss, name["reducer"], dataset.columns)

    collator: Collator = plugins["collator"].make(context)
    topology = description.topology
    layout = config.training.layout(dp=topology.dp, tp=topology.tp, cp=topology.cp, pp=topology.pp)
    order = SampleOrder(len(train.columns), config.training.batch_size, config.run.seed, config.training.shuffle)
    first, _ = order.mini_batch(order.start())
    first_batch = planned(str(plugins["collator"].loaded.record), collator, train.columns.take(first), layout)
    datasets = [dataset.columns for dataset in (train, evaluation) if dataset is not None]
    required = required_capabilities(topology, collator, datasets)
    check_capabilities(name["backend"], description.capabilities, required)
    return PreparedRun(
        resolved=resolved,
        tokenizer=tokenizer,
        train=train,
        evaluation=evaluation,
        context=context,
        collator=collator,
        reducer=plugins["reducer"].make(context),
        merger=plugins["merger"].make(context),
        loss=loss,
        description=description,
        required=required,
        layout=layout,
        order=order,
        total_steps=config.training.steps or order.steps_in(config.training.epochs or 1.0),
        first_batch=first_batch,
    )


def describe_data(dataset: TokenizedDataset | None) -> dict[str, Any] | None:
    """A dataset's name, format and counts as plain values."""
    return None if dataset is None else {"name": dataset.name, "format": dataset.format, **attrs.asdict(dataset.counts)}


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
