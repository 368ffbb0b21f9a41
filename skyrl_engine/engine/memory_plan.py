"""The memory of a run's ranks and the work of a step, planned from shapes before a rank starts."""

from collections.abc import Mapping
from typing import Any

from attrs import asdict, evolve, field, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import BatchPlan
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.automatic import find_device, find_device_bytes
from skyrl_engine.engine.batch_shape import BatchShape
from skyrl_engine.engine.model_shape import read_model_shape
from skyrl_engine.model_facts.loading_memory import count_loading_bytes
from skyrl_engine.model_facts.memory import CacheShape, format_bytes
from skyrl_engine.model_facts.rank_memory import (
    CACHES,
    ModelShape,
    RankMemory,
    RankWork,
    compute_bubble_share,
    count_frozen_bytes,
    count_rank_memory,
    count_sent_bytes,
    count_share,
)
from skyrl_engine.model_facts.tensor_parallel_plan import divides_keys, list_divided_patterns


@frozen
class StepWork:
    """One optimizer step: `tokens` of samples, the longest of `longest`, `dense` tokens that are computed, both over all `ranks` data-parallel
    ranks, each of which runs `micro_batches`, the largest of `largest` dense tokens.

    `padding` is the share of dense tokens without a sample; `fullest` counts the dense tokens of the data-parallel rank with most, for which
    the others wait, and `imbalance` is that over the mean of all; `empty` counts the micro-batches of all ranks that hold no sample, because
    every rank has equally many; `bubble` the share of the step in which pipeline stages wait; `sent` the bytes that a rank sends at most.
    """

    tokens: int
    longest: int
    dense: int
    ranks: int
    micro_batches: int
    largest: int
    padding: float
    fullest: int
    imbalance: float
    empty: int
    bubble: float
    sent: int


@frozen
class MemoryPlan:
    """The bytes of tensors that ranks hold at most: a `RankMemory` per pipeline stage, for the largest micro-batch of all data-parallel ranks.

    `device_bytes` is the memory of the GPUs that the plan is for; None: it is not known. What libraries and the allocator take comes on top.
    `loading` are the bytes of tensors in rank 0's host memory while the largest model is loaded, before a step begins, and `loads_whole` says
    that it reads that model whole. `shape` is that of the trained model, and `beside` are those of others on the ranks, by their names.
    """

    stages: tuple[RankMemory, ...]
    step: StepWork
    device_bytes: int | None
    loading: int
    loads_whole: bool
    shape: ModelShape = field(repr=False)
    beside: Mapping[str, ModelShape] = field(repr=False)

    @property
    def most(self) -> RankMemory:
        """The stage that holds most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool | None:
        """Say whether every stage fits its device; None where its memory is not known."""
        return None if self.device_bytes is None else self.most.total <= self.device_bytes

    def to_values(self) -> dict[str, Any]:
        """Return the plan in plain values."""
        stages = [
            {"stage": each.stage, "parts": dict(each.parts), "host": dict(each.host), "total": each.total} for each in self.stages
        ]
        loading = {"rank_0_host": self.loading, "whole": self.loads_whole}
        return {
            "stages": stages,
            "step": asdict(self.step),
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "loading": loading,
        }


@frozen
class RankSampling:
    """A generator on the ranks: whether it copies the weights (it does not where it reads those that are trained), and the tokens that it keeps
    keys and values of; None: as many as fit. `divided` says that tensor-parallel ranks share both.
    """

    copies: bool
    cached: int | None
    divided: bool = False


def plan_memory(
    resolved: ResolvedConfig,
    assembly: Assembly,
    cut: BatchPlan,
    *,
    tokens: IntArray,
    actions: IntArray,
    beside: Mapping[str, ModelConfig],
    sampling: RankSampling | None = None,
) -> MemoryPlan | None:
    """Plan the memory of a step whose samples have `tokens` int64[N], `actions` int64[N] of them scored, and are cut as `cut` says.

    `beside` are the models on the ranks that are not trained, by their names. None for a model whose configuration does not tell its shape.
    """
    model, description = resolved.config.model, assembly.description
    if (shape := read_model_shape(model)) is None:
        return None
    topology, layout, ranks = description.topology, description.describe_state(model), cut.mini_batches[0].ranks
    dense = [sum(batch.dense_tokens for batch in rank) for rank in ranks]
    heaviest = max((batch for rank in ranks for batch in rank), key=lambda batch: batch.dense_tokens)
    work = RankWork(len(ranks[0]), heaviest.dense_tokens, int(actions[heaviest.samples].sum()))
    shapes = {name: found for name, other in beside.items() if (found := read_model_shape(other)) is not None}
    stages, optimizer = [], resolved.config.optimizer
    for stage in range(topology.pp):
        held = count_rank_memory(
            shape,
            layout,
            topology,
            work,
            optimizer=optimizer.use,
            stage=stage,
            ema=optimizer.ema_decay is not None,
            stochastic_rounding=optimizer.stochastic_rounding,
            stages_saves=resolved.config.checkpoint.asynchronous,
        )
        frozen = {
            name: count_frozen_bytes(other, description.describe_state(other.model), topology, stage)
            for name, other in shapes.items()
        }
        stages.append(evolve(held, parts={**held.parts, **frozen, **_count_sampling_bytes(shape, sampling, topology)}))
    chosen = cut.mini_batches[0].samples
    step = StepWork(
        tokens=int(tokens[chosen].sum()),
        longest=int(tokens[chosen].max(initial=0)),
        dense=sum(dense),
        ranks=len(dense),
        micro_batches=work.micro_batches,
        largest=work.tokens,
        padding=BatchShape.of(cut, int(tokens.sum())).padding_share,
        fullest=max(dense),
        empty=sum(not len(batch.samples) for rank in ranks for batch in rank),
        imbalance=max(dense) * len(dense) / max(sum(dense), 1),
        bubble=compute_bubble_share(topology.pp, layout.pieces, work.micro_batches),
        sent=max(
            count_sent_bytes(shape, layout, topology, micro_batches=work.micro_batches, tokens=max(dense), stage=stage)
            for stage in range(topology.pp)
        ),
    )
    device_bytes = find_device_bytes(resolved) if find_device(resolved) == "cuda" else None
    loaded = {count_loading_bytes(each, own := description.describe_state(each.model)): own for each in (shape, *shapes.values())}
    loading = max(loaded)
    return MemoryPlan(tuple(stages), step, device_bytes, loading, loaded[loading].loading == "whole", shape, shapes)


def _count_sampling_bytes(shape: ModelShape, sampling: RankSampling | None, topology: Topology) -> dict[str, int]:
    """Count what a generator takes on a rank, where there is one: a copy of the weights, and the keys and values that it keeps."""
    if sampling is None:
        return {}
    shares = sampling.divided and topology.tp > 1
    taken, cache = dict[str, int](), CacheShape.of(shape.config)
    if sampling.copies:
        patterns = list_divided_patterns(shape.config)
        numbers = (count_share(each, patterns, topology) if shares else each.count for each in shape.parameters if not each.is_tied)
        taken["sampler's weights"] = sum(numbers) * shape.computed_bytes
    if sampling.cached is not None and cache is not None:
        size = cache.token_bytes(shape.model.dtype)
        taken[CACHES] = sampling.cached * (-(-size // topology.tp) if shares and divides_keys(shape.config) else size)
    return taken


def format_memory_plan(plan: MemoryPlan) -> dict[str, str]:
    """Return the plan in lines, by what each is about."""
    most, step = plan.most, plan.step
    free = ""
    if plan.device_bytes is not None:
        share = f"{most.total / plan.device_bytes:.0%} of {format_bytes(plan.device_bytes)}"
        free = f", {share}" if plan.fits else f", {share}: it does not fit"
    stage = f" (pipeline stage {most.stage})" if len(plan.stages) > 1 else ""
    named = {name: size for name, size in most.parts.items() if size}
    lines = {
        "memory of a rank": f"{format_bytes(most.total)} of tensors at most{stage}{free}",
        **{f"  {name}": format_bytes(size) for name, size in named.items()},
        **{f"  {name} in host memory": format_bytes(size) for name, size in most.host.items() if size},
    }
    if len(plan.stages) > 1:
        lines["memory by stage"] = ", ".join(f"{each.stage}: {format_bytes(each.total)}" for each in plan.stages)
    how = "which reads the whole model" if plan.loads_whole else "which checks the first layers; every rank reads its own part"
    lines["memory while loading"] = f"{format_bytes(plan.loading)} of tensors in host memory of rank 0, {how}"
    lines["work of a step"] = (
        f"{step.tokens:,} tokens of samples, {step.dense:,} computed, {step.padding:.1%} padding; "
        f"{step.micro_batches:,} micro-batches a rank, of up to {step.largest:,} tokens"
    )
    if step.ranks > 1:
        idle = f"; {step.empty:,} of {step.ranks * step.micro_batches:,} micro-batches hold no sample: ranks wait in them"
        lines["balance of ranks"] = (
            f"the fullest of {step.ranks:,} data-parallel ranks computes {step.fullest:,} tokens, {step.imbalance:.2f} times the mean of "
            f"{step.dense / step.ranks:,.0f}{idle if step.empty else ''}"
        )
    lines["sent by a rank"] = f"{format_bytes(step.sent)} a step"
    if len(plan.stages) > 1:
        lines["pipeline bubble"] = f"{step.bubble:.0%} of a step"
    return lines
