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
from skyrl_engine.config.automatic import with_rotary_length
from skyrl_engine.config.schema import DataConfig, EngineConfig
from skyrl_engine.contracts.kinds.backend import Capability
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.bundles import Bundles
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import BatchPlan
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.data.dataset import Split, TokenizedDataset, load_columns, open_source_of, separate_copies
from skyrl_engine.data.images.processor import load_vision
from skyrl_engine.data.sources.formats import Reading
from skyrl_engine.data.streaming.stream import StreamedData, StreamPosition
from skyrl_engine.data.text.template_rule import find_difference
from skyrl_engine.engine.assembly import Assembly, assemble
from skyrl_engine.engine.automatic import Choice, Choices, find_largest_unit, find_longest, find_unpaid
from skyrl_engine.engine.batch_shape import BatchShape
from skyrl_engine.engine.capability import collect_needed_columns, needs_of_reducer, vision_of
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.engine.schedule import load_own_schedule
from skyrl_engine.errors import Refusals
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.thresholds import refuse_longer_rows
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.run.checkpoint import Checkpoint
from skyrl_engine.training.frozen_model_compat import check_models_beside, refuse_blind_model
from skyrl_engine.training.sft.assumed_data import assume_samples
from skyrl_engine.training.sft.checks import (
    ConfigCheck,
    DataDraft,
    DraftCheck,
    check_samples,
    limit_to_model,
    plan_first_batch,
    plan_whole_batch,
    refuse_best_of_unknown_source,
)
from skyrl_engine.training.sft.mixture import DatasetMixture
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.training.sft.state import DataPosition, SftState, fingerprint, state_in
from skyrl_engine.training.sft.streaming import refuse_what_needs_all_data, stretch_samples
from skyrl_engine.training.sft.student_samples import lengthen_samples, refuse_unteachable_samples, samples_answers
from skyrl_engine.training.teacher import TEACHER, plan_endpoint, plan_teacher
from skyrl_engine.training.teacher_endpoint import EndpointTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DataProgress = Callable[[str, int, int], None]
"""Told what is being read, how much of it is done, and how much there is."""


@frozen(eq=False)
class PreparedRun:
    """A run that is ready to start its ranks. `first_batch` is the plan of the run's first mini-batch, for --dry-run to show; `teacher` the
    frozen model next to the trained one, None where there is none, or where a server, `endpoint`, holds it; `longest` counts the tokens of the
    longest sample, sampled ones included.
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
    endpoint: EndpointTeacher | None
    first_batch: BatchPlan = field(repr=False)
    longest: int
    choices: tuple[Choice, ...] = ()
    """Values that the engine chose where the configuration says "auto"."""

    stream: StreamedData | None = None
    """The training data where it is read while training; `train` and `order` are then those of its first mini-batch."""

    @property
    def start(self) -> DataPosition:
        """Return the position before the first mini-batch."""
        return self.order.start() if self.stream is None else self.stream.start()

    def read(self, position: DataPosition) -> tuple[SampleColumns, DataPosition]:
        """Read the mini-batch at a position, images included; return it and the position after it. Raises what reading raises."""
        if isinstance(position, StreamPosition):
            assert self.stream is not None, "a position of this run"
            dataset, after = self.stream.mini_batch(position)
            return dataset.columns, after
        chosen, following = self.order.mini_batch(position)
        return self.train.batch(chosen), following

    def progress_of(self, position: DataPosition) -> dict[str, float]:
        """Return `epoch`, the passes over the data up to a position, and of a stream how many rows were drawn, and samples dropped, so far."""
        if isinstance(position, StreamPosition):
            return {"epoch": position.passes, "data/rows": float(position.rows), "data/dropped": float(position.dropped)}
        return {"epoch": position.epoch + position.offset / self.order.samples}

    @property
    def fingerprint(self) -> str:
        """Tell the training data from other data: by its samples, or for a stream by its shards and settings."""
        return fingerprint(self.train.columns) if self.stream is None else self.stream.fingerprint

    def state_in(self, checkpoint: Checkpoint) -> SftState:
        """Return the state to go on from. Raises CheckpointError as `sft.state.state_in` does."""
        split_by_seed = self.resolved.config.data.eval_fraction > 0
        return state_in(checkpoint, self.order, self.fingerprint, split_by_seed=split_by_seed, streamed=self.stream is not None)

    @property
    def first_shape(self) -> BatchShape:
        """The work that the first mini-batch makes."""
        chosen, _ = self.order.mini_batch(self.order.start())
        return BatchShape.of(self.first_batch, int(np.diff(self.train.columns.token_offsets)[chosen].sum()))


def prepare(
    resolved: ResolvedConfig,
    progress: DataProgress | None = None,
    *,
    reading: Reading = "samples",
    step_separator: str = "\n",
    computed: AbstractSet[str] = frozenset(),
    before_building: Sequence[ConfigCheck] = (),
    after_building: Sequence[DraftCheck] = (),
) -> PreparedRun:
    """Load the data, make the controller's plugins, and refuse what cannot work. Starts nothing and writes nothing but the token cache.

    Where lengths are assumed, no data is read: `assume_samples` stands in its place, and nothing is held out.
    `reading` says how rows are read, and `step_separator` what stands after each step of an answer. `computed` are columns that the trainer
    computes, so that the data need not have them. `before_building` and `after_building` are the trainer's own checks, in their order. Whatever
    is found is raised at once.
    """
    choices, refusals = Choices(resolved), Refusals()
    choices.choose_dtype()
    resolved = choices.resolved
    config = resolved.config
    refusals.collect_all((*before_building, refuse_what_needs_all_data), resolved)
    files = ModelFiles.of(config.model)
    assembly = None
    with refusals.collect():
        assembly = assemble(resolved, files, max_sequence_length=config.data.max_length)
    if assembly is not None:
        refusals.collect_all((*after_building, refuse_unteachable_samples), DataDraft(resolved, files, assembly))
    check_models_beside(resolved, refusals)
    taught = frozenset(list_teacher_columns(config))
    computed = {*computed, *taught}
    data = config.data
    with refusals.collect():
        data = limit_to_model(config.data, files.facts)
    assumed = resolved.assumed.lengths
    splits: tuple[Split, ...] = ("train", "eval") if _holds_out(data) and assumed is None else ("train",)
    if assembly is None and assumed is None:
        # rows need the tokenizer and the parts that read them; whether they are there does not
        for split in splits:
            with refusals.collect():
                open_source_of(data, split)
    if assembly is None:
        refusals.raise_all()
    assert assembly is not None, "what hinders it was raised"
    needed = {need: asker for need, asker in collect_needed_columns(assembly.needs).items() if need not in computed}
    load = partial(
        _load,
        data,
        files,
        seed=config.run.seed,
        needed=needed,
        progress=progress,
        reading=reading,
        step_separator=step_separator,
    )
    loaded: dict[Split, TokenizedDataset] = {}
    stream = None
    for split in splits:
        with refusals.collect():
            if assumed is not None:
                loaded[split] = assume_samples(
                    assumed,
                    batch_size=config.training.batch_size,
                    longest=data.max_length,
                    reading=reading,
                    losses=assembly.objective.losses,
                )
            elif split == "train" and data.streaming:
                stream = _open_stream(resolved, data, files, assembly, reading, step_separator, needed)
                loaded[split], _ = stream.mini_batch(stream.start())
            else:
                loaded[split] = load(split=split)
    refusals.raise_all()
    train, evaluation = loaded["train"], loaded.get("eval")
    if evaluation is not None and (different := find_difference(train.rendering.record(), evaluation.rendering)):
        logger.warning("the held-out data %s is not like the training data: %s", evaluation.name, different)
    if evaluation is not None:
        with refusals.collect():
            refuse_best_of_unknown_source(config.evaluation, evaluation.source_names)
    for dataset in loaded.values() if assumed is None else ():
        with refusals.collect():
            check_samples(dataset, files.facts, assembly, reading)
    datasets = [dataset.columns for dataset in loaded.values()]
    # the longest samples of the run are among these
    laid_out = list(datasets)
    if data.streaming:
        with refusals.collect():
            laid_out.append(stretch_samples(train.columns.take(range(min(len(train), config.training.batch_size))), data))
    if samples_answers(resolved):
        with refusals.collect():
            laid_out.append(lengthen_samples(resolved, train, data.max_length))
    with refusals.collect():
        resolved = _with_rotary_length(resolved, files, laid_out)
    order = first_batch = teacher = endpoint = None
    required: frozenset[Capability] = frozenset()
    with refusals.collect():
        order = _order_of(resolved, train, evaluation)
        choices.resolved = resolved
        assembly = _choose_layout(choices, assembly, files, laid_out, order, pairs=reading in ("preferences", "rewards"))
        resolved = choices.resolved
        first_batch = plan_first_batch(resolved, assembly, loaded, order)
        for columns in laid_out[len(datasets) :]:
            plan_whole_batch(resolved, assembly, columns)
    longest = max(int(np.diff(columns.token_offsets).max(initial=1)) for columns in laid_out)
    with refusals.collect():
        teacher = plan_teacher(
            resolved,
            assembly,
            files,
            read=not taught.isdisjoint(need for needs in assembly.objective.needs.values() for need in needs),
            longest=longest,
            shorter="Set data.max_length",
        )
        refuse_blind_model("the teacher", "teacher", teacher, images=any(dataset.images is not None for dataset in loaded.values()))
    if order is not None:
        with refusals.collect():
            load_own_schedule(config.optimizer, _count_steps(config, order))
    with refusals.collect():
        endpoint = plan_endpoint(resolved, files)
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
        total_steps=_count_steps(config, order),
        teacher=teacher,
        endpoint=endpoint,
        first_batch=first_batch,
        longest=longest,
        required=required,
        stream=stream,
        choices=tuple(choices.made),
    )


def _open_stream(
    resolved: ResolvedConfig,
    data: DataConfig,
    files: ModelFiles,
    assembly: Assembly,
    reading: Reading,
    step_separator: str,
    needed: Mapping[str, str],
) -> StreamedData:
    config = resolved.config
    stream = StreamedData.of(
        data,
        files.tokenizer,
        batch_size=config.training.batch_size,
        seed=config.run.seed,
        shuffle=config.training.shuffle,
        needed=needed,
        reading=reading,
        step_separator=step_separator,
    )
    stream.check = partial(check_samples, facts=files.facts, assembly=assembly, reading=reading)
    return stream


def _count_steps(config: EngineConfig, order: SampleOrder) -> int:
    return config.training.steps or order.steps_in(config.training.epochs or 1.0)


def _choose_layout(
    choices: Choices, assembly: Assembly, files: ModelFiles, datasets: Sequence[SampleColumns], order: SampleOrder, *, pairs: bool
) -> Assembly:
    """Choose collator and token budget for this data, where the configuration leaves them open."""
    train = datasets[0]
    if assembly.collators is not None:
        first, _ = order.mini_batch(order.start())
        unpaid = find_unpaid(assembly.collators, separate_copies(train.take(first), first))
        assembly = assembly.with_collator(choices.choose_collator(assembly.collators, unpaid=unpaid, datasets=datasets))
    rows, topology = assembly.collator.product.rows, assembly.description.topology
    largest = max(find_largest_unit(columns, rows, topology) for columns in datasets)
    if pairs:
        # an answer may stand behind the prompt of another pair, as for KTO's baseline
        largest = max(largest, 2 * max(find_longest(columns, topology) for columns in datasets))
    choices.choose_micro_batch_tokens(files.facts, assembly.description, largest=largest, batch_local=assembly.batch_local)
    return assembly


def list_teacher_columns(config: EngineConfig) -> frozenset[str]:
    """Return the columns that a run's teacher gives, so that the data need not have them; none where there is no teacher."""
    if not config.has("teacher") or (config.teacher.path is None and config.teacher.url is None):
        return frozenset()
    ids = config.teacher.top_k is not None
    # as needs name them: the k likeliest tokens of a server, or the samples' own
    return frozenset({f"{TEACHER}[k]", "logprobs_at:teacher_ids"} if ids else {TEACHER})


def _load(data: DataConfig, files: ModelFiles, **reading: Any) -> TokenizedDataset:
    files.vision = vision_of(files.facts, load_vision(files.facts, data))
    return load_columns(data, files.tokenizer, vision=files.vision, **reading)


def _order_of(resolved: ResolvedConfig, train: TokenizedDataset, evaluation: TokenizedDataset | None) -> SampleOrder:
    training, data, seed = resolved.config.training, resolved.config.data, resolved.config.run.seed
    size = training.batch_size
    mixes = data.weights is not None and not data.streaming and resolved.assumed.lengths is None
    order = SampleOrder.of(
        train.columns,
        batch_size=size,
        seed=seed,
        shuffle=training.shuffle,
        drop_last=training.drop_last,
        mix=partial(_mix, data, train.source_names or (train.name,)) if mixes else None,
    )
    if order.mixture is not None:
        logger.info("an epoch draws %s", order.mixture)
    if size > order.samples and not data.streaming:
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


def _mix(data: DataConfig, names: Sequence[str], datasets: IntArray, bundles: Bundles | None) -> DatasetMixture:
    assert data.weights is not None, "datasets without weights are not mixed"
    return DatasetMixture.of(names, datasets, data.weights, data.stopping_strategy, bundles)


def _with_rotary_length(resolved: ResolvedConfig, files: ModelFiles, datasets: Sequence[SampleColumns]) -> ResolvedConfig:
    """Fix rotary frequencies for the longest sample, in models that choose them by length, unless `model.rotary_length` says for which.

    Raises UnsupportedError for a sample that is longer than the configured length.
    """
    if files.facts.rotary_length is None:
        return resolved
    longest = max(int(np.diff(columns.token_offsets).max(initial=1)) for columns in datasets)
    model = files.facts.model
    if model.rotary_length is None:
        resolved = with_rotary_length(resolved, longest)
        files.facts = ModelFacts(resolved.config.model)
    fixed = files.facts.rotary_length
    assert fixed is not None, "the same model still chooses by length"
    refuse_longer_rows(model.path, fixed, longest)
    logger.info("%s chooses its rotary frequencies by length: this run fixes those for rows of %d tokens", model.path, fixed)
    return resolved


def columns_to_read(resolved: ResolvedConfig, tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Name the columns that the objective needs of the data, each with who asks for it, as `load_columns` takes them."""
    config = resolved.config
    context = FactoryContext(config.run.seed, int(tokenizer.pad_token_id or 0), config.data.max_length)
    reducer: BoundPlugin[Reducer] = resolved.plugins["reducer"].bind("reducer", context)
    return collect_needed_columns({**ObjectiveParts.make(resolved.plugins, context).needs, **needs_of_reducer(reducer)})


def describe_data(dataset: TokenizedDataset | None, stream: StreamedData | None = None) -> dict[str, Any] | None:
    """Describe a dataset in plain values: name, format, further columns, who wrote its texts, and counts; of a stream, whose first mini-batch
    the dataset is, those of this mini-batch, and how much there is of it.
    """
    if dataset is None:
        return None
    columns = sorted(dataset.columns.columns)
    return {
        "name": dataset.name,
        "format": dataset.format,
        "columns": columns,
        **dataset.rendering.record(),
        **attrs.asdict(dataset.counts),
        **({} if stream is None else {"stream": stream.describe()}),
    }


def _holds_out(data: DataConfig) -> bool:
    return data.eval is not None or data.eval_fraction > 0
