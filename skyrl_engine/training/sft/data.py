"""Everything of a supervised run that can be decided before a rank starts: the assembly, the data, the order of samples, checks of all."""

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import field, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import DataConfig, EngineConfig
from skyrl_engine.contracts.kinds.backend import Capability
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.bundles import Bundles
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import BatchPlan
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.data.dataset import Split, TokenizedDataset, load_columns, open_source_of
from skyrl_engine.data.images.processor import load_vision
from skyrl_engine.data.sources.formats import PREFERENCES, Reading
from skyrl_engine.data.text.template_rule import find_difference
from skyrl_engine.engine.assembly import Assembly, assemble
from skyrl_engine.engine.capability import check_pairs, needed_columns, needs_of_reducer, vision_of
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ColumnError, DataError, Refusals
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.thresholds import refuse_longer_rows
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.registry.part import Part
from skyrl_engine.training.model_beside import check_models_beside
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.training.teacher import TEACHER, planned_teacher
from skyrl_engine.workers.dispatch import batch_structure, planned, token_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DataProgress = Callable[[str, int, int], None]
"""Told what is being read, how much of it is done, and how much there is."""


@frozen(eq=False)
class PreparedRun:
    """A run that is ready to start its ranks. `first_batch` is the plan of the run's first mini-batch, for --dry-run to show; `teacher` the
    frozen model beside the trained one, None where there is none.
    """

    resolved: ResolvedConfig
    files: ModelFiles
    assembly: Assembly
    train: TokenizedDataset
    evaluation: TokenizedDataset | None
    required: frozenset[Capability]
    order: SampleOrder
    total_steps: int
    teacher: FrozenModel | None
    first_batch: BatchPlan = field(repr=False)


def prepare(
    resolved: ResolvedConfig,
    progress: DataProgress | None = None,
    *,
    reading: Reading = "samples",
    given: AbstractSet[str] = frozenset(),
    check: Callable[[Assembly, ModelFiles], None] | None = None,
    refusals: Refusals | None = None,
) -> PreparedRun:
    """Load the data, make the controller's plugins, and refuse what cannot work. Starts nothing and writes nothing but the token cache.

    `reading` says how rows are read. `given` are columns that the trainer computes, so that the data need not have them; `check` is what the
    trainer refuses of the parts. Whatever is found is raised at once, with what `refusals` hold already.
    """
    config = resolved.config
    refusals = Refusals() if refusals is None else refusals
    files = ModelFiles.of(config.model)
    assembly = None
    with refusals.collect():
        assembly = assemble(resolved, files, max_sequence_length=config.data.max_length)
    if assembly is not None and check is not None:
        with refusals.collect():
            check(assembly, files)
    check_models_beside(resolved, refusals)
    given = {*given, *scored_by_teacher(config)}
    data = config.data
    with refusals.collect():
        data = limited_to_model(config.data, files.facts)
    splits: tuple[Split, ...] = ("train", "eval") if _holds_out(data) else ("train",)
    if assembly is None:
        # rows need the tokenizer and the parts that read them; whether they are there does not
        for split in splits:
            with refusals.collect():
                open_source_of(data, split)
        refusals.raise_all()
    assert assembly is not None, "what hinders it was raised"
    load = partial(
        _load,
        data,
        files,
        seed=config.run.seed,
        needed={need: asker for need, asker in needed_columns(assembly.needs).items() if need not in given},
        progress=progress,
        reading=reading,
    )
    loaded: dict[Split, TokenizedDataset] = {}
    for split in splits:
        with refusals.collect():
            loaded[split] = load(split=split)
    refusals.raise_all()
    train, evaluation = loaded["train"], loaded.get("eval")
    if evaluation is not None and (different := find_difference(train.rendering.record(), evaluation.rendering)):
        logger.warning("the held-out data %s is not like the training data: %s", evaluation.name, different)
    for dataset in loaded.values():
        with refusals.collect():
            _check_samples(dataset, files.facts, assembly, reading)
    datasets = [dataset.columns for dataset in loaded.values()]
    with refusals.collect():
        resolved = _with_rotary_length(resolved, files, datasets)
    order = first_batch = teacher = None
    required: frozenset[Capability] = frozenset()
    with refusals.collect():
        order = _order_of(resolved, train, evaluation)
        first_batch = _first_batch(resolved, assembly, loaded, order)
    longest = max(int(np.diff(columns.token_offsets).max(initial=1)) for columns in datasets)
    with refusals.collect():
        teacher = planned_teacher(
            resolved,
            assembly,
            files,
            read=TEACHER in given and TEACHER in assembly.objective.columns,
            longest=longest,
            shorter="Set data.max_length",
        )
    with refusals.collect():
        required = assembly.check_data(files.facts, datasets)
    refusals.raise_all()
    assert order is not None, "what hinders it was raised"
    assert first_batch is not None, "what hinders it was raised"
    return PreparedRun(
        resolved=resolved,
        files=files,
        assembly=assembly,
        train=train,
        evaluation=evaluation,
        order=order,
        total_steps=config.training.steps or order.steps_in(config.training.epochs or 1.0),
        teacher=teacher,
        first_batch=first_batch,
        required=required,
    )


def scored_by_teacher(config: EngineConfig) -> frozenset[str]:
    """Return the columns that a run's teacher gives, so that the data need not have them; none where there is no teacher."""
    return frozenset({TEACHER} if config.has("teacher") and config.teacher.path is not None else ())


def _load(data: DataConfig, files: ModelFiles, **reading: Any) -> TokenizedDataset:
    files.vision = vision_of(files.facts, load_vision(files.facts, data))
    return load_columns(data, files.tokenizer, vision=files.vision, **reading)


def _check_samples(dataset: TokenizedDataset, facts: ModelFacts, assembly: Assembly, reading: Reading) -> None:
    """Refuse a dataset of another kind than the trainer's, without anything to learn, or of another vocabulary. Raises DataError."""
    if reading == "samples" and dataset.format in PREFERENCES:
        raise ColumnError(
            f"{dataset.name} holds preferences, a chosen and a rejected answer to a prompt, and trainer sft learns from single answers",
            remedy='Set trainer = "preference", or learn from the chosen ones: data.map.completion=chosen',
            key="data.map",
        )
    if not dataset.columns.loss_weight.any():
        raise DataError(
            f"no token of {dataset.name} carries loss",
            remedy="Check data.format and data.loss_on with `skyrl-engine data preview`",
        )
    _refuse_unknown_tokens(facts, dataset)
    check_pairs(assembly.objective.losses, dataset.columns)


def _order_of(resolved: ResolvedConfig, train: TokenizedDataset, evaluation: TokenizedDataset | None) -> SampleOrder:
    training, seed = resolved.config.training, resolved.config.run.seed
    size = training.batch_size
    order = SampleOrder.of(train.columns, batch_size=size, seed=seed, shuffle=training.shuffle, drop_last=training.drop_last)
    if size > order.samples:
        logger.warning(
            "training.batch_size is %s and the data has %s samples: every step trains on all %s of them",
            size,
            order.samples,
            order.samples,
        )
    if evaluation is not None:
        # A group that fits no mini-batch is refused now, not after hours.
        SampleOrder.of(evaluation.columns, batch_size=size)
    return order


def _with_rotary_length(resolved: ResolvedConfig, files: ModelFiles, datasets: Sequence[SampleColumns]) -> ResolvedConfig:
    """Fix rotary frequencies for the longest sample, in models that choose them by length, unless `model.rotary_length` says for which.

    Raises UnsupportedError for a sample that is longer than the configured length.
    """
    if files.facts.rotary_length is None:
        return resolved
    longest = max(int(np.diff(columns.token_offsets).max(initial=1)) for columns in datasets)
    model = files.facts.model
    if model.rotary_length is None:
        model = attrs.evolve(model, rotary_length=longest)
        files.facts = ModelFacts(model)
    fixed = files.facts.rotary_length
    assert fixed is not None, "the same model still chooses by length"
    refuse_longer_rows(model.path, fixed, longest)
    logger.info("%s chooses its rotary frequencies by length: this run fixes those for rows of %d tokens", model.path, fixed)
    return attrs.evolve(resolved, config=attrs.evolve(resolved.config, model=model))


def limited_to_model(data: DataConfig, facts: ModelFacts) -> DataConfig:
    """Set `max_length` to the model's context length where it is not set already; nothing changes where neither says.

    Raises DataError for a `max_length` beyond the positions that the model has.
    """
    if data.max_length is None:
        return attrs.evolve(data, max_length=facts.context_length)
    positions = facts.extended_length
    if positions is not None and data.max_length > positions:
        raise DataError(
            f"data.max_length is {data.max_length}, and the model has {positions} positions (max_position_embeddings, by the factor of "
            "its rotary positions where they have one)",
            remedy=f"Set data.max_length to {positions} or less, or train a model that was extended to longer texts",
        )
    return data


def columns_to_read(resolved: ResolvedConfig, tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Name the columns that the objective needs of the data, each with who asks for it, as `load_columns` takes them."""
    config = resolved.config
    context = FactoryContext(config.run.seed, int(tokenizer.pad_token_id or 0), config.data.max_length)
    reducer: Part[Reducer] = resolved.plugins["reducer"].part("reducer", context)
    return needed_columns({**ObjectiveParts.made(resolved.plugins, context).needs, **needs_of_reducer(reducer)})


def describe_data(dataset: TokenizedDataset | None) -> dict[str, Any] | None:
    """Describe a dataset in plain values: name, format, further columns, who wrote its texts, and counts."""
    if dataset is None:
        return None
    columns = sorted(dataset.columns.columns)
    return {
        "name": dataset.name,
        "format": dataset.format,
        "columns": columns,
        **dataset.rendering.record(),
        **attrs.asdict(dataset.counts),
    }


def _first_batch(
    resolved: ResolvedConfig, assembly: Assembly, loaded: Mapping[Split, TokenizedDataset], order: SampleOrder
) -> BatchPlan:
    """Plan and weigh the first mini-batch, and plan the samples that take most room, so that what a later step would meet is refused now.

    Raises what the collator and the reducer raise.
    """
    training = resolved.config.training
    layout = assembly.layout(micro_batch_rows=training.micro_batch_rows, micro_batch_tokens=training.micro_batch_tokens)
    chosen, _ = order.mini_batch(order.start())
    first = loaded["train"].columns.take(chosen)
    plan = planned(assembly.collator, first, layout)
    token_weights(
        assembly.reducer,
        batch_structure(first, plan.mini_batches[0], assembly.context.max_sequence_length, reducer=assembly.reducer),
    )
    for dataset in loaded.values():
        columns = dataset.columns
        # beside others, because there may have to be as many samples as ranks
        some = np.union1d(largest_units(columns), np.arange(min(len(columns), training.batch_size)))
        planned(assembly.collator, columns.take(some), layout)
    return plan


def largest_units(columns: SampleColumns) -> IntArray:
    """Return the samples, int64[n], of the units that take most room: with the longest sample, in rows, in tokens, and padded in one piece."""
    units = Bundles.by_label(np.arange(len(columns), dtype=np.int64), columns.unit_ids)
    tokens = np.diff(columns.token_offsets)
    longest = units.maxima(tokens)
    chosen = {int(np.argmax(size)) for size in (longest, units.sizes, units.sums(tokens), units.sizes * longest)}
    return np.concatenate([units.members[unit] for unit in sorted(chosen)])


def _holds_out(data: DataConfig) -> bool:
    return data.eval is not None or data.eval_fraction > 0


def _refuse_unknown_tokens(facts: ModelFacts, dataset: TokenizedDataset) -> None:
    size, columns = facts.vocabulary_size, dataset.columns
    if size is None:
        return
    if int(columns.input_ids.max(initial=0)) >= size:
        token = int(np.argmax(columns.input_ids >= size))
        sample = int(np.searchsorted(columns.token_offsets, token, side="right")) - 1
        raise DataError(
            f"{dataset.name_of(sample)} holds the token id {int(columns.input_ids[token])} at token "
            f"{token - int(columns.token_offsets[sample])}, and the vocabulary of {facts.model.path} has {size} tokens",
            remedy="Use the tokenizer that belongs to the model: correct model.tokenizer, or make ready tokens again",
        )
    _refuse_unknown_candidates(facts, size, dataset)


def _refuse_unknown_candidates(facts: ModelFacts, size: int, dataset: TokenizedDataset) -> None:
    """Refuse an id beyond the vocabulary in a column of ids, at a response token that carries loss, naming sample and token."""
    columns = dataset.columns
    for name, ids in columns.columns.items():
        if ids.ndim != 2 or ids.dtype.kind != "i":
            continue
        wrong = (ids >= size).any(1) & (columns.loss_weight != 0)
        if wrong.any():
            action = int(np.argmax(wrong))
            sample = int(np.searchsorted(columns.action_offsets, action, side="right")) - 1
            raise DataError(
                f"the column {name!r} holds the token id {int(ids[action].max())} at response token "
                f"{action - int(columns.action_offsets[sample])} of {dataset.name_of(sample)}, and the vocabulary of "
                f"{facts.model.path} has {size} tokens",
                remedy="Write the column with the tokenizer of the model that is trained",
            )
