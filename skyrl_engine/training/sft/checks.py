"""Checks of a run over a dataset: of its samples against the model, and of its first mini-batch against collator and reducer."""

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
from attrs import frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.automatic import budget_of
from skyrl_engine.config.schema import DataConfig, EvaluationConfig
from skyrl_engine.contracts.values.bundles import Bundles
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import BatchPlan
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.data.dataset import Split, TokenizedDataset
from skyrl_engine.data.sources.formats import FORMATS, Reading
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.capability import check_pairs
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ColumnError, ConfigError, DataError, Problem
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.workers.dispatch import batch_structure, plan_batch, token_weights


@frozen
class DataDraft:
    """A run over a dataset under preparation, before its data is read."""

    resolved: ResolvedConfig
    files: ModelFiles
    assembly: Assembly


ConfigCheck = Callable[[ResolvedConfig], None]
"""A check of the configuration alone, before anything is built."""

DraftCheck = Callable[[DataDraft], None]
"""A check of the configuration, the model's files and the assembly, before the data is read."""


def limit_to_model(data: DataConfig, facts: ModelFacts) -> DataConfig:
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


def refuse_best_of_unknown_source(evaluation: EvaluationConfig, names: Sequence[str]) -> None:
    """Raise ConfigError for an `evaluation.best` that is the loss of a held-out dataset which is not among `names`."""
    reported = [f"loss/{name}" for name in names]
    if evaluation.best is None or not evaluation.best.startswith("loss/") or evaluation.best in reported:
        return
    told = (
        f"evaluations report {', '.join(reported)}" if reported else "losses of sources are reported where data.eval names several"
    )
    raise ConfigError(
        [Problem("evaluation.best", f"no held-out dataset has {evaluation.best!r}: {told}", 'Name one of these, or "loss"')]
    )


def check_samples(dataset: TokenizedDataset, facts: ModelFacts, assembly: Assembly, reading: Reading) -> None:
    """Refuse a dataset of another kind than the trainer's, without anything to learn, or of another vocabulary. Raises DataError."""
    if reading == "samples" and FORMATS[dataset.format].has_roles:
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


def plan_first_batch(
    resolved: ResolvedConfig, assembly: Assembly, loaded: Mapping[Split, TokenizedDataset], order: SampleOrder
) -> BatchPlan:
    """Plan and weigh the first mini-batch, and plan the samples that take most room, so that what a later step would meet is refused now.

    Samples that are assumed by their lengths have no values to weigh. Raises what the collator and the reducer raise.
    """
    training = resolved.config.training
    chosen, _ = order.mini_batch(order.start())
    first = loaded["train"].take(chosen)
    plan = plan_whole_batch(resolved, assembly, first)
    if resolved.assumed.lengths is None:
        token_weights(
            assembly.reducer,
            batch_structure(first, plan.mini_batches[0], assembly.context.max_sequence_length, reducer=assembly.reducer),
        )
    for dataset in loaded.values():
        columns = dataset.columns
        # with others, because there may have to be as many samples as ranks
        some = np.union1d(largest_units(columns), np.arange(min(len(columns), training.batch_size)))
        plan_whole_batch(resolved, assembly, columns.take(some))
    return plan


def plan_whole_batch(resolved: ResolvedConfig, assembly: Assembly, columns: SampleColumns) -> BatchPlan:
    """Plan a mini-batch by the sizes of the configuration. Raises what the collator raises."""
    training = resolved.config.training
    layout = assembly.layout(micro_batch_rows=training.micro_batch_rows, micro_batch_tokens=budget_of(training))
    return plan_batch(assembly.collator, columns, layout)


def largest_units(columns: SampleColumns) -> IntArray:
    """Return the samples, int64[n], of the units that take most room: with the longest sample, in rows, in tokens, and padded in one piece."""
    units = Bundles.by_label(np.arange(len(columns), dtype=np.int64), columns.unit_ids)
    tokens = np.diff(columns.token_offsets)
    longest = units.maxima(tokens)
    chosen = {int(np.argmax(size)) for size in (longest, units.sizes, units.sums(tokens), units.sizes * longest)}
    return np.concatenate([units.members[unit] for unit in sorted(chosen)])
