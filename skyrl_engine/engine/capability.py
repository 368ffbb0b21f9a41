"""Refuse while planning what the chosen plugins, data and model cannot do together."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from skyrl_engine.config.schema import ModelConfig, OptimizerConfig
from skyrl_engine.contracts.kinds.backend import OPTIONAL_SCORES, BackendDescription, Capability
from skyrl_engine.contracts.kinds.collator import CARRIED_EXTRAS, Carried, Collator, declared_extras
from skyrl_engine.contracts.kinds.loss import Loss, compares_pairs
from skyrl_engine.contracts.kinds.needs import DIVERGENCE, ROLE_NEED, TOP_1_AGREEMENT, column_forms, model_score
from skyrl_engine.contracts.kinds.optimizer_settings import AdamW8BitSettings, AdamWSettings
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.pairs import pair_places, roles_in
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.data.images.processor import NoVision, Vision
from skyrl_engine.errors import DataError, UnsupportedError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner, blame

logger = logging.getLogger(__name__)

_ACTION: dict[Capability, str] = {
    "padded": "Choose a collator that packs rows, or another backend",
    "packed": "Choose a collator with one sample per row, such as padded, or a backend that supports packing",
    "tree": "Choose the collator packed, or a backend that computes shared prefixes once, such as fsdp",
    "tensor_parallel": "Set the backend's tensor-parallel size to 1, or choose another backend",
    "pipeline_parallel": "Set the backend's pipeline-parallel size to 1, or choose another backend",
    "context_parallel": "Set the backend's context-parallel size to 1, or choose another backend",
    "vision": "Remove the images from the data, or choose a backend and a layout that train vision-language models, such as fsdp",
    **dict.fromkeys((*OPTIONAL_SCORES, "divergence"), "Choose another backend"),
    "value_head": "Set model.value_head = false, or choose another backend",
    "lora": "Remove model.lora, or choose a backend that trains adapters, such as fsdp",
    "load_in_4bit": "Remove model.lora.load_in_4bit, or choose a backend and a layout that hold weights in 4 bits, such as fsdp without tensor "
    "parallelism",
    "compile": "Set model.compile = false, or choose a backend that compiles layers, such as fsdp",
    "attention": 'Set model.attention = "auto", or choose a backend and a layout that let it choose, such as fsdp',
    "embedding_noise": "Remove model.neftune_alpha, or choose a backend and a layout that add noise to embeddings, such as megatron, or fsdp "
    "without tensor parallelism",
    "freeze": "Remove model.freeze, or choose a backend that freezes parameters, such as fsdp",
    "router_replay": "Leave the expert routes out of the samples, or choose another backend",
}


def collect_required_capabilities(
    topology: Topology, collator: Collator, datasets: Sequence[SampleColumns], model: ModelConfig | None = None
) -> frozenset[Capability]:
    """Collect the capabilities that this layout, this collator's rows, this data and this model ask of a backend; None: any plain model."""
    return frozenset(
        (*_iterate_required(topology, collator, datasets), *(() if model is None else _iterate_required_by_model(model)))
    )


def _iterate_required_by_model(model: ModelConfig) -> Iterator[Capability]:
    if model.value_head:
        yield "value_head"
    if model.lora is not None:
        yield "lora"
        if model.lora.load_in_4bit:
            yield "load_in_4bit"
    if model.compile:
        yield "compile"
    if model.attention != "auto":
        yield "attention"
    if model.neftune_alpha is not None:
        yield "embedding_noise"
    if model.freeze:
        yield "freeze"


def _iterate_required(topology: Topology, collator: Collator, datasets: Sequence[SampleColumns]) -> Iterator[Capability]:
    yield collator.rows
    if topology.tp > 1:
        yield "tensor_parallel"
    if topology.pp > 1:
        yield "pipeline_parallel"
    if topology.cp > 1:
        yield "context_parallel"
    yield from _collect_extras(datasets)


def _collect_extras(datasets: Sequence[SampleColumns]) -> Iterator[Carried]:
    """Collect what the data has in addition to tokens: a collator must lay it over rows, and a model must take it."""
    present = {name for columns in datasets for name in columns.extras}
    return (capability for capability, names in CARRIED_EXTRAS.items() if names & present)


def require_carried(name: str, collator: Collator, datasets: Sequence[SampleColumns]) -> None:
    """Raises UnsupportedError where the data has images or expert routes that the collator does not declare to carry."""
    for capability in _collect_extras(datasets):
        if capability not in declared_extras(collator):
            content = "images" if capability == "vision" else "expert routes"
            raise UnsupportedError(
                f"the data has {content}, which collator {name} does not carry (it does not declare {capability!r})",
                remedy=f"Remove the {content} from the data, or choose another collator, such as padded",
            )


def check_capabilities(backend: str, declared: frozenset[Capability], required: frozenset[Capability]) -> None:
    """Raises UnsupportedError naming the first missing capability and what to change."""
    for capability in sorted(required - declared):
        has = ", ".join(sorted(declared)) or "none"
        raise UnsupportedError(
            f"the run needs the capability {capability!r}, which backend {backend} does not declare (it declares: {has})",
            remedy=_ACTION[capability],
        )


def check_optimizer(optimizer: OptimizerConfig, model: ModelConfig, backend: str, declared: frozenset[Capability]) -> None:
    """Raises UnsupportedError for an optimizer, groups of parameters or an average of weights that the backend does not declare, and for
    moments in 8 bits of a model in float64; every backend steps by AdamW.
    """
    if optimizer.use != AdamWSettings.use and optimizer.use not in declared:
        raise UnsupportedError(
            f'optimizer.use is "{optimizer.use}", and backend {backend} does not declare that it steps by it',
            remedy=f'Set optimizer.use = "{AdamWSettings.use}", or choose another backend, such as fsdp',
        )
    if optimizer.use == AdamW8BitSettings.use and model.dtype == "float64":
        raise UnsupportedError(
            f'optimizer.use = "{optimizer.use}" steps in float32, and model.dtype is "float64"',
            remedy=f'Set model.dtype = "float32" or "bfloat16", or optimizer.use = "{AdamWSettings.use}"',
        )
    if optimizer.stochastic_rounding:
        _check_stochastic_rounding(optimizer, model, backend, declared)
    if optimizer.groups and "parameter_groups" not in declared:
        raise UnsupportedError(
            f"optimizer.groups is set, and backend {backend} does not declare that parameters may have numbers of their own",
            remedy="Remove optimizer.groups, or choose another backend, such as fsdp",
        )
    if optimizer.ema_decay is not None and "ema" not in declared:
        raise UnsupportedError(
            f"optimizer.ema_decay is set, and backend {backend} does not declare that it averages weights",
            remedy="Remove optimizer.ema_decay, or choose another backend, such as fsdp",
        )


def _check_stochastic_rounding(
    optimizer: OptimizerConfig, model: ModelConfig, backend: str, declared: frozenset[Capability]
) -> None:
    """Raises UnsupportedError where there is nothing to round, or where the backend does not declare that it rounds so."""
    others = {
        f'model.dtype is "{model.dtype}"': model.dtype != "bfloat16",
        "model.lora trains adapters, which are held in float32": model.lora is not None,
        "optimizer.ema_decay averages weights in float32": optimizer.ema_decay is not None,
    }
    for cause in (cause for cause, holds in others.items() if holds):
        raise UnsupportedError(
            f"optimizer.stochastic_rounding holds the model's weights in bfloat16 alone, and {cause}",
            remedy='Remove optimizer.stochastic_rounding, or train all weights with model.dtype = "bfloat16" and without an average',
        )
    if "stochastic_rounding" not in declared:
        raise UnsupportedError(
            f"optimizer.stochastic_rounding is set, and backend {backend} does not declare that it steps without float32 master weights",
            remedy="Remove optimizer.stochastic_rounding, or choose backend fsdp without cpu_offload",
        )


def check_asynchronous_saves(backend: str, declared: frozenset[Capability]) -> None:
    """Raises UnsupportedError for a backend that does not declare that its checkpoints can be written while it trains."""
    if "asynchronous_saves" not in declared:
        raise UnsupportedError(
            f"backend {backend} does not declare that its checkpoints can be written while it trains (the capability 'asynchronous_saves')",
            remedy="Set checkpoint.asynchronous = false, or choose another backend, such as fsdp",
        )


def check_model(facts: ModelFacts, described: BackendDescription) -> None:
    """Raises ModelError for a configuration that cannot be read or is of no model that can be trained, and UnsupportedError for a
    vision-language model that is not supported, or that the backend in its layout does not train.
    """
    load_config(facts.model, images="vision" in described.capabilities)


def check_layout(owner: Owner, facts: ModelFacts, described: BackendDescription) -> None:
    """Raises UnsupportedError for a model that the backend of `owner` does not build, or that its layout does not divide."""
    if facts.config is not None:
        with blame(owner, "refuse_model"):
            described.refuse_model(facts.config, facts.model)


def check_loading(owner: Owner, facts: ModelFacts, described: BackendDescription, rows: RowKind) -> None:
    """Raises ModelError or UnsupportedError for what the backend of `owner` would refuse when it loads the model, as far as it can tell."""
    with blame(owner, "rehearse"):
        described.rehearse(facts.model, rows)


def vision_of(facts: ModelFacts, vision: Vision) -> Vision:
    """Return `vision`, the model's image inputs, unless the model takes images but is trained on text alone."""
    if isinstance(vision, NoVision) or facts.config is None or facts.takes_images:
        return vision
    return NoVision(
        f"{facts.model.path}, of the architecture {facts.config.model_type}, is trained on text alone", "Use a dense Qwen3-VL model"
    )


def check_reducer(label: str, loss: Loss, reducer: str) -> None:
    """Raises UnsupportedError for a reducer that makes no sense for the loss, warns of one that its authors did not mean it for."""
    if loss.reducers is not None and reducer not in loss.reducers:
        raise UnsupportedError(
            f"{label} makes sense only with the reducers {', '.join(loss.reducers)}, not with {reducer}",
            remedy=f'Set reducer.use = "{loss.reducers[0]}"',
        )
    if loss.advised_reducers is not None and reducer not in loss.advised_reducers:
        logger.warning("%s was made for the reducers %s, and runs with %s", label, ", ".join(loss.advised_reducers), reducer)


def check_role(term: BoundPlugin[Loss]) -> None:
    """Raises UnsupportedError for a term on one half of pairs whose loss compares both."""
    if term.on is not None and compares_pairs(term.product):
        raise UnsupportedError(
            f'{term.label} compares the two halves of a pair, and {term.place}.on = "{term.on}" gives it one',
            remedy=f"Remove {term.place}.on",
        )


def check_pairs(objective: Iterable[BoundPlugin[Loss]], columns: SampleColumns) -> None:
    """Raises DataError where a loss compares pairs, or reads roles, and these samples are not such, naming the samples."""
    for part in objective:
        if ROLE_NEED not in part.product.needs and part.on is None:
            continue
        roles = roles_in(columns.sample_values)
        if roles is None:
            raise DataError(
                f"{part.label} needs to know chosen from rejected samples, and the data has no roles",
                remedy='Train on preferences: set trainer = "preference"',
            )
        if compares_pairs(part.product):
            if len(columns) == len(np.unique(columns.unit_ids)):
                raise DataError(
                    f"{part.label} compares the two answers of a pair, and the data has single answers with a label",
                    remedy="Give rows a chosen and a rejected answer, or learn from single ones, in trainer preference by --preset kto",
                )
            carrying = np.concatenate([[0], np.cumsum(columns.loss_weight != 0)])[columns.action_offsets]
            pair_places(columns.unit_ids, roles, np.diff(carrying), columns.sample_ids)


def check_scores(
    label: str, needs: Iterable[str], *, value_head: bool, backend: str = "", declared: frozenset[Capability] | None = None
) -> None:
    """Raises UnsupportedError where `label` ("loss ppo") needs values and the model has no head to compute them, or a score that `backend`
    does not declare among its capabilities (None: every score).
    """
    if "values" in needs and not value_head:
        raise UnsupportedError(
            f"{label} needs the model's score 'values', and the model has no value head", remedy="Set model.value_head = true"
        )
    for need in needs:
        score = model_score(need)
        if declared is not None and score in (DIVERGENCE, TOP_1_AGREEMENT) and "divergence" not in declared:
            raise UnsupportedError(
                f"{label} compares the model with a teacher over the whole vocabulary, and backend {backend}, in this layout, does not declare "
                "the capability 'divergence'",
                remedy="Choose a backend that does: fsdp, deepspeed or megatron",
            )
        if declared is not None and score in OPTIONAL_SCORES and score not in declared:
            raise UnsupportedError(
                f"{label} needs the model's score {need!r}, and backend {backend} does not declare the capability {score!r}",
                remedy="Choose another backend, such as fsdp, or a loss that does without",
            )


def needs_of_reducer(reducer: BoundPlugin[Reducer]) -> dict[str, tuple[str, ...]]:
    """The columns and values of samples that a reducer reads, by its label; empty for one that reads nothing but counts."""
    needs = tuple(getattr(reducer.product, "needs", ()))
    return {reducer.label: needs} if needs else {}


def collect_needed_columns(needs: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The columns and values of samples among needs by label, as they are asked for (`ids[k]`, `sample:domain`), each with who asks first:
    what `load_columns` takes.
    """
    columns: dict[str, str] = {}
    for label, names in needs.items():
        for name in names:
            if model_score(name) is None or column_forms((name,)):
                columns.setdefault(name, f"{label} needs")
    return columns
