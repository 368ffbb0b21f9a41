"""One rank at work: it makes plugins from their locks, drives the backend over shards, and counts CPU time. It knows nothing of Ray."""

import gc
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from attrs import Factory, evolve, field, frozen
from attrs.validators import gt, lt

from skyrl_engine.cleanup import close_after, finally_close
from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.backend import (
    Backend,
    HasAdapterSets,
    KeepsAverages,
    Objective,
    Offloads,
    OptimStep,
    RankBatch,
    RankEnvironment,
    StagesSaves,
    as_optim_step,
)
from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.kinds.needs import asks_a_teacher, is_aligned
from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.values.model import ComputeDtype, ModelConfig
from skyrl_engine.contracts.values.outputs import Metric, RankOutput, as_rank_output
from skyrl_engine.contracts.values.returned import describe_returned, require_returned
from skyrl_engine.contracts.values.topology import RankCoords
from skyrl_engine.errors import ContractError, EngineError, ResultError
from skyrl_engine.modeling.compiling import CLOCK
from skyrl_engine.modeling.device_memory import take_peak_bytes
from skyrl_engine.modeling.matmul_precision import multiply_in, refuse_matmul_precision
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import KINDS_OF_PARTS, ObjectiveParts
from skyrl_engine.objective.policy_metrics import Watched
from skyrl_engine.objective.score import ScoreObjective
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.product import list_missing_members
from skyrl_engine.spans import Spans
from skyrl_engine.workers.aligned_teacher import AlignedTeacher
from skyrl_engine.workers.batch import ShardBatch
from skyrl_engine.workers.dispatch import Shard
from skyrl_engine.workers.frozen_models import FrozenModels
from skyrl_engine.workers.noise_keys import NoiseKeys
from skyrl_engine.workers.process_group import Rendezvous, allow_time_to_load, join, leave, pick_device
from skyrl_engine.workers.profile import RankProfile
from skyrl_engine.workers.scored_tokens import Selection
from skyrl_engine.workers.spec import WorkerSpec
from skyrl_engine.workers.staged_save import StagedSave, WrittenFiles
from skyrl_engine.workers.teaching import TaughtBatch

if TYPE_CHECKING:
    from skyrl_engine.workers.generation import RankGenerator
    from skyrl_engine.workers.sampler_facts import SamplerFacts

Mode = Literal["forward_backward", "evaluate", "score"]


@frozen
class Pass:
    """The orders of one pass over a mini-batch, alike on all ranks.

    `forward_backward` differentiates the objective, `evaluate` computes it without gradients, `score` gives the model's `scores` alone, of the
    loss-carrying tokens or of all action tokens. `step` counts optimizer steps and seeds losses that draw random numbers. `micro_batches` are
    the half-open range [start, stop) of those that every rank runs; None: all. `model` names the frozen model that scores; None: the one
    that is trained. `labels` names a column of token ids that are scored in the place of the samples' own tokens. `bound`, `watch` and
    `coefficients` as in `LossObjective`. `vocabulary_size` counts the tokens of a frozen model: padding beyond it becomes token 0; None: no
    padding is.
    """

    mode: Mode
    step: int = 0
    per_token_outputs: bool = True
    temperature: float = field(default=1.0, validator=[gt(0), lt(float("inf"))])
    scores: frozenset[str] = frozenset()
    tokens: Selection = "loss"
    micro_batches: tuple[int, int] | None = None
    model: str | None = None
    labels: str | None = None
    bound: Mapping[str, str] = Factory(dict)
    watch: frozenset[Watched] = frozenset()
    coefficients: Mapping[str, float] = Factory(dict)
    vocabulary_size: int | None = None


@frozen(eq=False)
class RankReply:
    """The answer to a pass over a shard: outputs, and CPU seconds by span."""

    output: RankOutput
    cpu_seconds: dict[str, float]


@frozen
class StepReply:
    """The answer to an optimizer step. `peak_bytes` is the most memory that the rank took since the step before, where it knows."""

    step: OptimStep
    cpu_seconds: dict[str, float]
    peak_bytes: int | None


class Worker:
    """One rank, which answers the messages of `workers.messages`, in the same order on every rank.

    `number` is its rank, `frozen` holds its frozen models, `adapter_sets` its further adapter sets by number, and `spans` counts its CPU time.
    """

    def __init__(self, spec: WorkerSpec, rank: int, *, device_index: int = 0, rendezvous: Rendezvous | None = None) -> None:
        device = pick_device(spec.device, device_index)
        self._owns_group = join(rank, spec.topology.world_size, device, rendezvous)
        self._process = ExitStack()
        try:
            refuse_matmul_precision(spec.context.matmul_precision, spec.model.dtype, device)
            self._process.enter_context(multiply_in(spec.context.matmul_precision))
            seed_everything(spec.context.seed + rank)
            self._set_up(spec, rank, device)
        except BaseException as error:
            close_after(error, self._leave)
            raise

    def _set_up(self, spec: WorkerSpec, rank: int, device: str) -> None:
        self._seed = spec.context.seed
        self.number = rank
        self.spans = Spans()
        self._context = spec.context
        self._shown = spec.shown
        self._topology = spec.topology
        self._model, self._device = spec.model, device
        self._generator: RankGenerator | None = None
        self._profile: RankProfile | None = None
        self._save: StagedSave | None = None
        if spec.plugins.keys() - {"backend"}:
            self.use_plugins(spec.plugins)
        self._plugin = SelectedPlugin.from_lock(spec.plugins["backend"])
        self._environment = RankEnvironment(rank, spec.topology.world_size, device, spec.context.seed, spec.rows)
        self.backend = self._set_up_model(spec.model, spec.optimizer)
        self.frozen = FrozenModels(self.backend, lambda model: self._set_up_model(model, None))
        self.adapter_sets: dict[int, Worker] = {}
        require_returned(self.backend_label, "coords", getattr(self.backend, "coords", None), RankCoords)
        if self.backend.coords != (described := spec.topology.coords(rank)):
            raise ContractError(
                f"{self.backend_label} stands at {self.backend.coords} and described {described}",
                remedy="Lay out ranks in setup as skyrl_engine_describe_backend says: tp fastest, then cp, dp, pp",
            )

    def _set_up_model(self, model: ModelConfig, optimizer: OptimizerSettings | None) -> Backend:
        backend: Backend = self._plugin.make(self._context)
        if self._owns_group and self._environment.world_size > 1:
            allow_time_to_load(model)
        backend.setup(model, optimizer, self._environment)
        return backend

    @property
    def dtype(self) -> ComputeDtype:
        """Return the precision that the run computes in."""
        return self._model.dtype

    @property
    def backend_label(self) -> str:
        """Return the backend as errors name it: its kind, name, distribution and version."""
        return str(self._plugin.loaded.record)

    def open_adapter_set(self, number: int, spec: WorkerSpec) -> None:
        """Train a further set of adapters, `spec.model.lora`, over the frozen weights of this model."""
        self.adapter_sets[number] = _AdapterSetWorker(self.backend, spec, self.number, self._device)

    def drop_adapter_set(self, number: int) -> None:
        """Free a further set of adapters."""
        self.adapter_sets.pop(number).close()
        # its modules, and a backend's units over them, hold each other
        gc.collect()

    def use_plugins(self, plugins: Mapping[str, Mapping[str, Any]]) -> None:
        """Make collator and objective of these locks, for the passes from now on; the model stays as it is."""
        wanted = KINDS_OF_PARTS | {"collator"}
        selected = {place: SelectedPlugin.from_lock(lock) for place, lock in plugins.items() if lock["record"]["kind"] in wanted}
        self._objective_parts = ObjectiveParts.make(selected, self._context)
        self._collator: BoundPlugin[Collator] = selected["collator"].bind("collator", self._context)

    def wrap_collator(self, wrap: Callable[[Collator], Collator]) -> None:
        """Build rows by what `wrap` makes of the collator, until other plugins are used."""
        self._collator = evolve(self._collator, product=wrap(self._collator.product))

    def run(self, work: Pass, shard: Shard) -> RankReply:
        """One pass over the shard. An EngineError of one of several ranks names the rank."""
        try:
            return self._run_pass(work, shard)
        except EngineError as error:
            if (size := self._environment.world_size) > 1:
                error.details = (*error.details, f"rank {self.number} of {size} met this in a pass")
            raise

    def _run_pass(self, work: Pass, shard: Shard) -> RankReply:
        first, last = work.micro_batches or (0, None)
        batch: RankBatch = ShardBatch(
            shard, self._collator, work.tokens, self.spans, first, last, work.labels, work.vocabulary_size, self._noise(work)
        )
        objective = self._objective(work)
        aligned: AlignedTeacher | None = None
        if any(map(is_aligned, objective.needs)):
            aligned = self.frozen.aligned_teacher(self._model)
        if asks_a_teacher(objective.needs):
            batch = TaughtBatch(batch, aligned or self.frozen.teacher)
        # those of passes that only score count for the next one that learns, whose metrics are the step's
        seconds = 0.0
        with self.spans("model"):
            if work.mode == "forward_backward":
                method, returned = "forward_backward", self.backend.forward_backward(batch, objective)
                seconds = CLOCK.drain()
            else:
                method, returned = "forward", self.frozen.scorer(work.model).forward(batch, objective)
        output = as_rank_output(self.backend_label, method, returned)
        if seconds:
            output = evolve(output, metrics={**output.metrics, "compile_seconds": Metric.max(seconds)})
        if aligned is not None and (counts := aligned.drain_counts())[1]:
            output = evolve(output, metrics={**output.metrics, "teacher/aligned_share": Metric.mean(*map(float, counts))})
        return RankReply(output, self.spans.drain())

    def _noise(self, work: Pass) -> NoiseKeys | None:
        alpha = self._model.neftune_alpha
        return None if alpha is None or work.mode != "forward_backward" else NoiseKeys(alpha, self._seed, work.step)

    def _objective(self, work: Pass) -> Objective:
        if work.mode == "score":
            return ScoreObjective(work.scores, work.temperature, self.spans)
        return LossObjective(
            self._objective_parts,
            seed=self._seed,
            step=work.step,
            per_token_outputs=work.per_token_outputs,
            spans=self.spans,
            temperature=work.temperature,
            shown=self._shown,
            bound=work.bound,
            watch=work.watch,
            coefficients=work.coefficients,
        )

    def step_optimizer(self, settings: OptimizerSettings | None) -> StepReply:
        """Apply the accumulated gradient."""
        with self.spans("optimizer"):
            returned = self.backend.optim_step(settings)
        return StepReply(as_optim_step(self.backend_label, returned), self.spans.drain(), take_peak_bytes(self._device))

    def make_generator(self, lock: Mapping[str, Any], facts: "SamplerFacts", version: int) -> None:
        """Make the generator of a lock, after closing the one before; `RankGenerator.start` says which ranks sample."""
        from skyrl_engine.workers.generation import RankGenerator

        self.end_generator()
        self._generator = RankGenerator.start(
            lock,
            self._context,
            self.backend,
            start=partial(facts.make_start, self._model, self._device, version=version),
            topology=self._topology,
            backend_label=self.backend_label,
            dtype=self.dtype,
        )

    @property
    def generator(self) -> "RankGenerator":
        """The generator, once it was made."""
        assert self._generator is not None, "the generator was not started"
        return self._generator

    def begin_profile(self, path: Path, *, memory: bool) -> None:
        """Record with torch's profiler, for files whose names begin with `path` and this rank."""
        self._profile = RankProfile.begin(path.with_name(f"{path.name}-rank-{self.number}"), self._device, memory=memory)

    def end_profile(self) -> None:
        """Write what was recorded."""
        profile, self._profile = self._profile, None
        assert profile is not None, "no profile was begun"
        profile.end()

    def stage_save(self, directory: Path) -> None:
        """Copy the training state, and begin to write the copy; the copy before it must have been collected."""
        assert self._save is None, "a save is under way"
        if not isinstance(self.backend, StagesSaves):
            raise ContractError(
                f"{self.backend_label} declares the capability 'asynchronous_saves' and has no method stage_save",
                remedy="Implement contracts.StagesSaves, or do not declare it",
            )
        write = self.backend.stage_save(directory)
        if not callable(write):
            raise ResultError(
                f"{self.backend_label} returned {describe_returned(write)} from stage_save, which cannot be called",
                remedy="Return a function that writes what was copied, and returns the names of its files",
            )
        self._save = StagedSave(self.backend_label, write, directory)

    def collect_save(self, *, wait: bool) -> WrittenFiles | None:
        """Return the files of what was staged; None while they are written, unless it is to `wait`. Raises what writing raised."""
        assert self._save is not None, "no save is under way"
        try:
            written = self._save.collect(wait=wait)
        except BaseException:
            self._save = None
            raise
        if written is not None:
            self._save = None
        return written

    def load_averages(self, directory: Path) -> None:
        """Load a checkpoint with the averages of its weights in their place."""
        if not isinstance(self.backend, KeepsAverages):
            raise ContractError(
                f"{self.backend_label} has no method load_averages, by which averages of weights are read",
                remedy="Implement contracts.KeepsAverages",
            )
        self.backend.load_averages(directory)

    def leave_device(self) -> None:
        """Move the trained model and the frozen ones to host memory."""
        for model in self._offloading():
            model.offload()

    def return_to_device(self) -> None:
        """Move them back."""
        for model in self._offloading():
            model.reload()

    def _offloading(self) -> list[Offloads]:
        models = (self.backend, *self.frozen.whole_models)
        for model in models:
            if not isinstance(model, Offloads):
                raise ContractError(
                    f"{self.backend_label} declares the capability 'offload' and has no methods offload and reload",
                    remedy="Implement contracts.Offloads, or do not declare it",
                )
        return [model for model in models if isinstance(model, Offloads)]

    def end_generator(self) -> None:
        """Close the generator, if there is one."""
        if self._generator is not None:
            generator, self._generator = self._generator, None
            generator.close()

    def close(self) -> None:
        """Close all parts, whichever of them fails, once a save under way has ended. Raises the first failure."""
        if self._save is not None:
            self._save.end()
        with ExitStack() as ends:
            # the last first: the group that collectives of the backend run in is left after it
            for close in (
                self._leave,
                self.backend.close,
                self.frozen.close,
                *(adapters.close for adapters in self.adapter_sets.values()),
            ):
                ends.enter_context(finally_close(close))
            self.end_generator()

    def _leave(self) -> None:
        self._process.close()
        if self._owns_group:
            leave()


class _AdapterSetWorker(Worker):
    """A set of adapters at work over the frozen weights of another's backend; the process and its group are the other's."""

    def __init__(self, base: Backend, spec: WorkerSpec, rank: int, device: str) -> None:
        self._base, self._owns_group, self._process = base, False, ExitStack()
        self._set_up(spec, rank, device)

    def _set_up_model(self, model: ModelConfig, optimizer: OptimizerSettings | None) -> Backend:
        if optimizer is None:
            return super()._set_up_model(model, None)
        assert model.lora is not None, "a set of adapters without adapters"
        adapters = cast("HasAdapterSets", self._base).adapter_set(model.lora, optimizer, self._seed)
        if problems := list_missing_members(KINDS["backend"], adapters):
            raise ContractError(
                f"{self.backend_label} returned {describe_returned(adapters)} from adapter_set, which is no backend: {problems[0]}",
                remedy="Return a product with every method of a backend from adapter_set",
            )
        return adapters


def seed_everything(seed: int) -> None:
    """Seed the process-wide random states that models (dropout) draw from; plugins must not."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the legacy state: third-party model code draws from it
    torch.manual_seed(seed)
