"""Layouts of a model on ranks: every division that backends offer, by the arithmetic of `model_facts.rank_memory`, best first."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

from attrs import evolve, field, fields, frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.engine.automatic import align_for
from skyrl_engine.errors import ContractError, EngineError
from skyrl_engine.model_facts.rank_memory import (
    ModelShape,
    RankMemory,
    RankWork,
    compute_bubble_share,
    count_frozen_bytes,
    count_rank_memory,
    count_sent_bytes,
    plan_micro_batch_tokens,
)
from skyrl_engine.registry.known import read_first_party

FREE_SHARE: Final = 0.1
"""Share of a device that a proposed layout leaves to CUDA, libraries and fragments."""

_FULL_PIPELINE: Final = 4
"""Micro-batches per stage that keep a pipeline busy: it then waits in less than a fifth of a step."""
_RECOMPUTED: Final = 4 / 3
"""Work of a step that computes its forward pass twice, over that of one which does not: a backward pass is two forward passes."""


@frozen
class StepSize:
    """The size of the step that layouts are searched for: `tokens` of its samples on all ranks, and of the `longest` one."""

    tokens: int
    longest: int


@frozen
class ProposedLayout:
    """A layout by the configuration's `keys`, and what it would take: `memory` is that of the stage that holds most.

    `sent` counts bytes per token of the step that a rank sends; `work` is the time in which a step is computed, over that of ranks that compute
    nothing twice and wait neither in a pipeline nor for the longest sample.
    """

    keys: Mapping[str, Any]
    memory: RankMemory = field(repr=False)
    work: float
    sent: float
    offloads: bool

    @property
    def order(self) -> tuple[bool, float, float, int]:
        """The best layout has the least: offloading waits for host memory, then computing counts, in steps of 5 %, then what is sent."""
        return self.offloads, round(self.work / 0.05), self.sent, self.memory.total

    def list_overrides(self) -> list[str]:
        """Return the keys as `key=value` words of a command line."""
        return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.keys.items()]


def search_layouts(
    shape: ModelShape,
    backends: Sequence[SelectedPlugin],
    ranks: int,
    size: StepSize,
    *,
    optimizer: OptimizerConfig,
    table: str,
    beside: Mapping[str, ModelShape] | None = None,
    memory: int,
) -> list[ProposedLayout]:
    """Return all layouts of a model that `backends`, with their options, offer on so many ranks with devices of `memory` bytes, best first.

    `table` has the sizes of micro-batches ("training", "rl"), `beside` the models on the ranks that are not trained. Those that do not fit
    come last, the one that misses least first. Raises ContractError for a backend that offers values of an option that it does not have.
    """
    room = int(memory * (1 - FREE_SHARE))
    proposed = []
    for backend in backends:
        for options, description in _list_layouts(backend, shape, ranks, optimizer):
            for recomputes in (False, True):
                model = evolve(shape, model=evolve(shape.model, activation_checkpointing=recomputes))
                proposed.append(
                    _propose(_name_backend(backend), options, description, model, size, optimizer, table, dict(beside or {}), room)
                )
    fitting = sorted((each for each in proposed if each.memory.total <= room), key=lambda each: each.order)
    return fitting + sorted((each for each in proposed if each.memory.total > room), key=lambda each: each.memory.total)


def _list_layouts(
    backend: SelectedPlugin, shape: ModelShape, ranks: int, optimizer: OptimizerConfig
) -> Iterator[tuple[dict[str, Any], BackendDescription]]:
    """Yield the options of a backend in every layout of so many ranks that it offers and takes, and its description with them."""
    model = shape.model
    used = {
        "lora": model.lora is not None,
        "value_head": model.value_head,
        optimizer.use: optimizer.use != "adamw",
        "ema": optimizer.ema_decay is not None,
        "stochastic_rounding": optimizer.stochastic_rounding,
    }
    required = {name for name, is_used in used.items() if is_used}
    offered = backend.loaded.describe_backend(backend.options, ranks).layout_choices
    own = set() if backend.loaded.schema is None else {each.name for each in fields(backend.loaded.schema)}
    if unknown := sorted(offered.keys() - own):
        raise ContractError(
            f"{backend.loaded.record} offers layouts by the option {unknown[0]!r}, which it does not have",
            remedy="Name options of its configuration schema in layout_choices",
        )
    for values in product(*offered.values()):
        options = dict(zip(offered, values, strict=True))
        try:
            chosen = SelectedPlugin.of_loaded(backend.loaded, {**backend.table, **options}, "--fit")
            description = chosen.loaded.describe_backend(chosen.options, ranks)
            description.refuse_model(shape.config, shape.model)
        except EngineError:
            continue
        if required <= description.capabilities:
            yield {**_list_set_options(backend), **options}, description


def _name_backend(backend: SelectedPlugin) -> str:
    """Return what `backend.use` says of a backend: the name of a first-party one, of others where they are from too."""
    record = backend.loaded.record
    is_ours = record.source == "distribution" and read_first_party().get(("backend", record.name)) == record.distribution
    return record.name if is_ours else record.reference


def _list_set_options(backend: SelectedPlugin) -> dict[str, Any]:
    """Return the options of a backend that are not its defaults."""
    if backend.loaded.schema is None:
        return {}
    unset = {each.name: each.default for each in fields(backend.loaded.schema)}
    return {name: value for name, value in backend.table.items() if unset[name] != value}


def _propose(
    backend: str,
    options: Mapping[str, Any],
    description: BackendDescription,
    shape: ModelShape,
    size: StepSize,
    optimizer: OptimizerConfig,
    table: str,
    beside: Mapping[str, ModelShape],
    room: int,
) -> ProposedLayout:
    topology, layout = description.topology, description.describe_state(shape.model)
    kept: dict[str, Any] = {
        "optimizer": optimizer.use,
        "ema": optimizer.ema_decay is not None,
        "stochastic_rounding": optimizer.stochastic_rounding,
    }
    alignment = align_for(topology)
    longest = -(-size.longest // alignment) * alignment
    tokens = max(longest, -(-size.tokens // topology.dp))
    frozen = [
        sum(count_frozen_bytes(other, description.describe_state(other.model), topology, stage) for other in beside.values())
        for stage in range(topology.pp)
    ]
    planned = plan_micro_batch_tokens(shape, layout, topology, memory=max(1, room - max(frozen)), **kept) or longest
    if topology.pp > 1:
        planned = min(planned, tokens // (_FULL_PIPELINE * topology.pp))
    # a shorter micro-batch than the longest sample is none; a longer one than the rank's share of the step is not filled
    budget = max(longest, min(planned, tokens))
    work = RankWork(-(-tokens // budget), budget, budget)
    held = []
    for stage, taken in enumerate(frozen):
        own = count_rank_memory(shape, layout, topology, work, stage=stage, **kept)
        held.append(evolve(own, parts={**own.parts, **({"frozen models": taken} if taken else {})}))
    bubble = compute_bubble_share(topology.pp, layout.pieces, work.micro_batches)
    sent = max(
        count_sent_bytes(shape, layout, topology, micro_batches=work.micro_batches, tokens=tokens, stage=stage)
        for stage in range(topology.pp)
    )
    recomputes = shape.model.activation_checkpointing
    return ProposedLayout(
        keys={
            "backend.use": backend,
            **{f"backend.{name}": value for name, value in options.items()},
            "model.activation_checkpointing": recomputes,
            f"{table}.micro_batch_tokens": budget,
        },
        memory=max(held, key=lambda each: each.total),
        # ranks that do not share the longest sample wait for the one that has it
        work=(_RECOMPUTED if recomputes else 1.0) / (1 - bubble) * max(1.0, size.longest * topology.dp / max(size.tokens, 1)),
        sent=sent / max(size.tokens, 1),
        offloads=any(holding.on_host for holding in layout.holdings),
    )
