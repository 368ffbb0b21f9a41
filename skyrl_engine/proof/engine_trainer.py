"""Our own `Engine` as a function of rows and cut, for `prove_trainer`: the same promise, the same program, the same rows as other trainers.

The engine's collators choose micro-batches themselves. Here a collator plans the cut that is asked for, and everything else is the run's: its
collator builds the rows, its reducer weighs them, its backend differentiates. The rows that ranks build are reported as forward passes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.collator import Collator, DenseBatch
from skyrl_engine.contracts.kinds.needs import ROLE_NEED
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MicroBatchPlan, MiniBatchPlan, SampleLengths
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.roles import CHOSEN, REJECTED, ROLE
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.pass_engine import PassEngine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.proof.forwards import Forward
from skyrl_engine.proof.row_kinds import Row, find_kind, list_groups, list_sequences
from skyrl_engine.proof.trainer import GradientFunction, TrainerPass
from skyrl_engine.proof.trainer_cuts import TrainerCut
from skyrl_engine.proof.trainer_definitions import find_advantages
from skyrl_engine.workers.messages import Message

if TYPE_CHECKING:
    from skyrl_engine.workers.worker import Worker

REFERENCE = "reference"

Table = Mapping[str, Any]


@contextmanager
def adapt_engine(config: Mapping[str, Table], *, reference: str | None = None) -> Iterator[GradientFunction]:
    """Yield the gradient function of `Engine` with the tables of `config`, for `prove_trainer`; leaving the context ends the ranks.

    `config` is what `Engine.open` takes, without a collator, a number of ranks and a launcher, which are the cut's. `reference` is the folder
    of the frozen model that a loss of preferences compares with. Rollouts bring their advantages, and the engine scores them itself where a
    loss reads `old_logprobs`. Cuts that pad on the left, and those whose ranks get unequally many micro-batches, raise UnsupportedError when
    they are computed. Raises UnsupportedError for a config that chooses what the cut does.
    """
    if "collator" in config or {"ranks", "launch"} & set(config.get("run", {})):
        raise UnsupportedError(
            "the cut chooses [collator], run.ranks and run.launch itself",
            remedy="Leave them out of the configuration that is proved",
        )
    with ExitStack() as stack:
        engines: dict[tuple[str, int], Engine] = {}

        def compute(rows: Sequence[Row], cut: TrainerCut) -> TrainerPass:
            planned = _plan_cut(rows, cut)
            key = (cut.form, cut.ranks)
            if key not in engines:
                launch = {"ranks": cut.ranks, "launch": "inline" if cut.ranks == 1 else "ray"}
                tables = {**config, "collator": {"use": cut.form}, "run": {**config.get("run", {}), **launch}}
                engine = stack.enter_context(Engine.open(tables))
                if reference is not None:
                    engine.add_frozen(FrozenModel(REFERENCE, ModelConfig(reference)))
                engine.group.ask(WatchRows())
                engines[key] = engine
            return _compute(engines[key], rows, planned)

        yield compute


@frozen(eq=False)
class CutCollator:
    """A collator that plans one cut of one batch, and builds rows as `collator` does."""

    collator: Collator
    mini_batch: MiniBatchPlan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)

    def plan(self, lengths: SampleLengths, layout: Layout) -> BatchPlan:
        return BatchPlan((self.mini_batch,), layout, lengths.sample_ids)


@frozen(eq=False)
class WatchedRows:
    """A collator that notes the rows which it builds."""

    collator: Collator
    built: list[Forward]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)

    def build(self, *arguments: Any, **options: Any) -> DenseBatch:
        made = self.collator.build(*arguments, **options)
        ids = made["input_ids"]
        padding = ids.numel() - int(made.sequence_lengths.values.sum())
        self.built.append(Forward(ids.shape[0], ids.shape[1], 0, padding))
        return made


_built: dict[int, list[Forward]] = {}
"""The rows that were built since somebody took them, by the worker's id: workers of one process have one rank each."""


@frozen
class WatchRows(Message[None]):
    """Note the rows that a rank builds, until it uses other plugins."""

    verb = "watch"

    def answer(self, rank: "Worker") -> None:
        built = _built.setdefault(id(rank), [])
        rank.wrap_collator(lambda collator: WatchedRows(collator, built))


@frozen
class TakeBuiltRows(Message[list[Forward]]):
    """Return the rows that a rank built since the last time, and forget them."""

    verb = "watch"

    def answer(self, rank: "Worker") -> list[Forward]:
        built = list(_built[id(rank)])
        _built[id(rank)].clear()
        return built


def _compute(engine: Engine, rows: Sequence[Row], planned: MiniBatchPlan) -> TrainerPass:
    assembly = engine.assembly
    bound = assembly.collator
    cutting = evolve(assembly, collator=evolve(bound, product=CutCollator(bound.product, planned)))
    passes = PassEngine(cutting, engine.group, assembly.layout())
    reads = frozenset(assembly.objective.reads)
    try:
        plan = _score(engine, passes.plan(_make_columns(rows, reads)), reads)
        engine.group.ask(TakeBuiltRows())
        passes.forward_backward(plan).result()
        gradients = passes.gradients()
        built = [forward for rank in engine.group.ask(TakeBuiltRows()) for forward in rank]
    finally:
        passes.discard()
    return TrainerPass(gradients, built)


def _score(engine: Engine, plan: Plan, reads: frozenset[str]) -> Plan:
    """Add the columns that losses read of models."""
    if "old_logprobs" in reads:
        plan = plan.with_columns({"old_logprobs": engine.score(plan).result().on_actions("logprobs")})
    if "ref_logprobs" in reads:
        plan = plan.with_columns({"ref_logprobs": engine.score(plan, model=REFERENCE).result().on_actions("logprobs")})
    return plan


def _make_columns(rows: Sequence[Row], reads: frozenset[str]) -> SampleColumns:
    """Make a sample of each sequence, whose tokens after the first are its response, trained or not."""
    sequences = [sequence for row in rows for sequence in list_sequences(row)]
    unit_ids = np.repeat(np.arange(len(rows)), [len(list_sequences(row)) for row in rows])
    columns, values = {}, {}
    if "advantages" in reads:
        columns["advantages"] = [
            [advantage] * len(sequence.trained) for advantage, sequence in zip(find_advantages(rows), sequences, strict=True)
        ]
    if ROLE_NEED in reads:
        values[ROLE] = np.tile([CHOSEN, REJECTED], len(rows))
    group_of = {place: number for number, places in enumerate(list_groups(rows)) for place in places}
    return SampleColumns.from_lists(
        input_ids=[sequence.input_ids for sequence in sequences],
        num_actions=[len(sequence.trained) for sequence in sequences],
        loss_mask=[sequence.trained.astype(np.int64) for sequence in sequences],
        columns=columns,
        sample_values=values,
        group_ids=np.array([group_of[row] for row in unit_ids.tolist()]) if find_kind(rows[0]) == "rollout" else None,
        unit_ids=unit_ids,
    )


def _plan_cut(rows: Sequence[Row], cut: TrainerCut) -> MiniBatchPlan:
    """Return the plan of exactly this cut, over samples that are the rows' sequences."""
    if cut.padding_side == "left":
        raise UnsupportedError("the engine's rows are padded on the right", remedy="Take cuts that pad on the right")
    divided = cut.divide(len(rows))
    if len(set(map(len, divided))) > 1:
        raise UnsupportedError(
            "the engine fills ranks up with empty rows until all have equally many micro-batches, which are no rows of the cut",
            remedy="Take a cut that gives every rank equally many micro-batches",
        )
    lengths = [[len(sequence.input_ids) for sequence in list_sequences(row)] for row in rows]
    first = offsets_of(np.array([len(own) for own in lengths]))

    def plan(members: Sequence[int]) -> MicroBatchPlan:
        samples = np.concatenate([np.arange(first[place], first[place + 1]) for place in members])
        own = np.concatenate([lengths[place] for place in members])
        if cut.form == "packed":
            width = int(own.sum())
            return MicroBatchPlan(samples, np.array([0, len(samples)]), width, width - 1)
        width = int(own.max()) + cut.extra_padding
        return MicroBatchPlan(samples, np.arange(len(samples) + 1), width, width - 1)

    return MiniBatchPlan(tuple(tuple(plan(members) for members in rank) for rank in divided))
