"""`Engine`: plan, score, learn, step, save. The one way from a batch to the ranks, under every trainer."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, cast

import numpy as np
from attrs import evolve

from skyrl_engine.cleanup import close_after, finally_close
from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.automatic import budget_of, list_automatic_keys
from skyrl_engine.config.schema import GeneratorTable, OptimizerConfig, RunConfig
from skyrl_engine.contracts.kinds.backend import BackendDescription, OptimStep
from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import LoraConfig
from skyrl_engine.contracts.values.outputs import BatchOutput, Metric, RankOutput
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.engine.accumulation import MiniBatchGradient
from skyrl_engine.engine.assembly import Assembly, assemble
from skyrl_engine.engine.automatic import Choices
from skyrl_engine.engine.capability import check_asynchronous_saves
from skyrl_engine.engine.cpu_check import describe_sharing
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.engine.pass_engine import NOTHING_BOUND
from skyrl_engine.engine.plan import Plan
from skyrl_engine.engine.results import PassResult, counts_of, means_over, refuse_not_finite
from skyrl_engine.engine.sampling import SamplingVerbs
from skyrl_engine.engine.saved_state import EngineState
from skyrl_engine.engine.schedule import learning_rate as scheduled_rate
from skyrl_engine.engine.schedule import load_own_schedule
from skyrl_engine.engine.state_save import StateSave
from skyrl_engine.engine.steering import Steering
from skyrl_engine.engine.validation import (
    has_adapter_sets,
    labels_in,
    name_call_in_errors,
    refuse_foreign_numbers,
    refuse_no_adapter_sets,
    refuse_scores,
    refuse_unknown_tokens,
)
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.thresholds import refuse_longer_rows
from skyrl_engine.objective.policy_metrics import Watched
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.workers.dispatch import PlacedShard
from skyrl_engine.workers.future import Future
from skyrl_engine.workers.launch import WorkerGroup, launch_workers
from skyrl_engine.workers.listing import FileFacts
from skyrl_engine.workers.messages import (
    Export,
    Load,
    Save,
    StepOptimizer,
    UsePlugins,
)
from skyrl_engine.workers.scored_tokens import Selection
from skyrl_engine.workers.worker import Pass, StepReply

logger = logging.getLogger(__name__)

CONFIGURED: Final = "configured"
"""Stands for the configured number where None means something else."""


class Engine(SamplingVerbs):
    """A model on its ranks, and the verbs: `plan`, `score`, `forward_backward`, `optim_step`, `generate`, `save`, `load`, `export`.

    Opened from a configuration, which says everything that a training run needs but the data:

        with Engine.open("train.toml") as engine:
            plan = engine.plan(columns)
            for mini_batch in range(len(plan)):
                engine.forward_backward(plan, mini_batch)
                engine.optim_step()

    Passes and steps return a `Future`: they go to the ranks at once and in order, and `result()` waits. A failure that nobody waited for is
    raised by the next `result()`, or by the next step. `step` counts the optimizer steps that were taken.

    A failure on one of several ranks is raised within seconds, with the rank's number. Where the others answered too, the engine goes on: drop
    the gradient with `discard` and call it again. Where they did not, because they wait for the failed rank in a collective, all ranks are
    ended, and every later call raises EngineClosedError, as after `close`: open an engine again and `load` what was saved last.
    """

    def __init__(
        self,
        assembly: Assembly,
        group: WorkerGroup,
        *,
        layout: Layout,
        optimizer: OptimizerConfig,
        total_steps: int | None,
        files: ModelFiles,
        registry: Registry,
        generator: GeneratorTable | None,
    ) -> None:
        """Work on ranks that were started already; `Engine.open` starts them.

        `layout` is the default cut of `plan`, `optimizer` with `total_steps` the numbers of steps (None: the schedule never ends), `files` what
        an export holds with weights, `registry` the plugins that `use_loss` finds, `generator` where generators live. Raises
        UnsupportedError for a schedule that ends, without `total_steps`.
        """
        super().__init__(assembly, group, layout)
        self._optimizer = optimizer
        self._total_steps = total_steps
        self._files = files
        self._registry = registry
        self._generator_table = generator
        self._peak_bytes: list[int] = []
        self._state_save: StateSave | None = None
        self._frozen: dict[str, ModelFacts] = {}
        self._own_schedule = load_own_schedule(optimizer, total_steps)

    @classmethod
    def open(cls, config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, total_steps: int | None = None) -> Self:
        """Start the ranks that a configuration asks for, with the model loaded. Use it as a context manager: leaving it ends the ranks.

        `config` is a file (TOML or YAML) or a mapping of its tables; `[model]` is needed, and data need not be named. `overrides` are
        `section.key=value`, as on the command line. `total_steps` (default: `training.steps`) is where a schedule of learning rates ends.
        Raises ConfigError, PluginError, ModelError, UnsupportedError or WorkerError.
        """
        choices = Choices(_resolve(config, overrides))
        choices.choose_dtype()
        files = ModelFiles.of(choices.resolved.config.model)
        data = choices.resolved.config.data if choices.resolved.config.has("data") else None
        assembly = assemble(choices.resolved, files, max_sequence_length=None if data is None else data.max_length)
        if assembly.collators is not None:
            unpaid = "batches are not known yet"
            assembly = assembly.with_collator(choices.choose_collator(assembly.collators, unpaid=unpaid))
        grows = any(key.endswith(".micro_batch_tokens") for key in list_automatic_keys(choices.resolved))
        choices.choose_micro_batch_tokens(files.facts, assembly.description, largest=1, batch_local=assembly.batch_local)
        resolved = choices.resolved
        steps = resolved.config.training.steps if total_steps is None else total_steps
        return cls.launch(resolved, evolve(assembly, budget_grows=grows), files, steps)

    @classmethod
    def describe(cls, config: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> BackendDescription:
        """Return what the backend of a configuration declares, in its layout of ranks; nothing is started or loaded. Arguments as of `open`.

        Raises ConfigError, PluginError or UnsupportedError.
        """
        resolved = _resolve(config, overrides)
        backend = resolved.plugins["backend"]
        return backend.loaded.describe_backend(backend.options, resolved.config.run.ranks)

    @classmethod
    def launch(
        cls, resolved: ResolvedConfig, assembly: Assembly, files: ModelFiles, total_steps: int | None, layout: Layout | None = None
    ) -> Self:
        """Start the ranks of an assembly; `layout` None is that of `[training]`. Raises WorkerError, or the typed error that a rank met."""
        config = resolved.config
        spec = assembly.worker_spec(config.model, config.optimizer.settings(), device=config.run.device)
        if layout is None:
            training = config.training
            layout = assembly.layout(micro_batch_rows=training.micro_batch_rows, micro_batch_tokens=budget_of(training))
        if shared := describe_sharing(config.run):
            logger.warning("%s", shared)
        table = cast("GeneratorTable | None", config.selected.get("generator"))
        spare_cpus = table.replicas * table.cpus if table is not None and table.launch == "ray" else 0.0
        group = launch_workers(spec, launch=config.run.launch, ray_address=config.run.ray_address, spare_cpus=spare_cpus)
        try:
            # while the model is there: it may be moved before an export asks
            files.remember_source()
            return cls(
                assembly,
                group,
                layout=layout,
                optimizer=config.optimizer,
                total_steps=total_steps,
                files=files,
                registry=resolved.registry,
                generator=table,
            )
        except BaseException as error:
            close_after(error, group.close)
            raise

    def score(
        self,
        plan: Plan,
        *,
        scores: Iterable[str] = ("logprobs",),
        tokens: Selection = "actions",
        labels: str | None = None,
        temperature: float = 1.0,
        model: str | None = None,
    ) -> Future[BatchOutput]:
        """Score a batch with the model as it is, without a loss and without gradients.

        `scores` are names of model scores: "logprobs" and "entropy" (nats), "values" of a model with a value head, and "logits",
        "logsumexp", "mean_logprob" and "log_sum_squares" where the backend declares them. `tokens` are all response tokens, or those that
        carry loss, and `labels` names the column of token ids int64[A, 1] that are scored in their place; None: themselves.
        `temperature` divides the logits. `model` names a frozen model that was added. The output has one field per score, float32.

        Raises UnsupportedError for a score that the model does not have, and for a model that was not added; DataError for labels that are
        no column of one token id per token.
        """
        self.group.refuse_ended()
        wanted = frozenset(scores)
        facts = self._facts_of(model)
        refuse_scores(wanted, self.assembly, value_head=facts.model.value_head)
        with name_call_in_errors("score"):
            work = Pass(
                "score",
                self.step,
                temperature=temperature,
                scores=wanted,
                tokens=tokens,
                model=model,
                labels=labels,
                vocabulary_size=None if model is None else facts.vocabulary_size,
            )
        return self._passes.forward(plan, work, needs=labels_in(plan.columns, labels, tokens, facts.vocabulary_size)).then(
            lambda outputs: self._passes.merge(outputs, plan.cut)
        )

    def optim_step(
        self,
        *,
        learning_rate: float | None = None,
        betas: tuple[float, float] | None = None,
        epsilon: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | Literal["configured"] | None = CONFIGURED,
    ) -> Future[OptimStep]:
        """Take one step of the configured optimizer with the accumulated gradient, and clear it.

        A number that is given counts for this step; without it the configured one does, and the learning rate follows the schedule.
        `max_grad_norm` None does not clip.

        Waits for the passes before it. Raises ModelError, before the weights change, where a loss or the gradient is not finite, and
        UnsupportedError where nothing is accumulated, or a mini-batch in part, and for a number that the optimizer does not have.
        """
        self.group.refuse_ended()
        configured = self._schedule_settings()
        with name_call_in_errors("optim_step"):
            numbers = {"learning_rate": learning_rate, "betas": betas, "epsilon": epsilon, "weight_decay": weight_decay}
            changes: dict[str, Any] = {name: number for name, number in numbers.items() if number is not None}
            if max_grad_norm != CONFIGURED:
                changes["max_grad_norm"] = max_grad_norm
            refuse_foreign_numbers(configured, changes)
            settings = evolve(configured, **changes)
        self._gradient.refuse_incomplete()
        for part in self._gradient.parts:
            for pass_ in part.passes:
                pass_.result()
        return self._step_optimizer(settings)

    def train(
        self,
        plan: Plan,
        *,
        staged: bool = False,
        temperature: float = 1.0,
        per_token_outputs: bool = True,
        bound: Mapping[str, str] = NOTHING_BOUND,
        watch: Iterable[Watched] = (),
        meanwhile: Callable[[], None] | None = None,
        steering: Steering | None = None,
    ) -> PassResult:
        """Take one optimizer step on every mini-batch of a plan, in order, with the configured numbers.

        `loss` is the objective, the sum of weight times term; over several mini-batches sums become their mean. `staged` places the shards of
        all mini-batches before the first step, for passes that must not wait for the controller; otherwise each mini-batch is cut and placed
        when its turn comes. Samples that the plan sets apart are computed without gradients, or not at all, with the same outputs and metrics.
        `bound` and `watch` as in `forward_backward`. `meanwhile` is called once, while the ranks work on the last mini-batch; not at all where
        they work in this process, whose time it would take. `steering` gives the coefficients of terms, step by
        step. Raises ModelError, before the weights change, where the loss or the gradient of a mini-batch is not finite.
        """
        self.group.refuse_ended()
        self._gradient.refuse_any()
        with name_call_in_errors("train"):
            work = self._learning_pass(per_token_outputs, temperature, bound, watch)
        columns = self._passes.columns_of(work)
        shards: Iterable[list[PlacedShard]] = (self._passes.weigh_and_ship(plan, number, columns) for number in range(len(plan)))
        if staged:
            shards = list(shards)
        outputs: list[RankOutput] = []
        applied: list[OptimStep] = []
        for mini_batch, placed in enumerate(shards):
            # a failed pass leaves the gradient of a part on the ranks, which is refused until it is dropped
            self._gradient.parts.append(MiniBatchGradient(plan, mini_batch, placed))
            do = meanwhile if meanwhile is not None and mini_batch == len(plan) - 1 and self.group.concurrent else _do_nothing
            coefficients = {} if steering is None else dict(steering.coefficients)
            of_step = evolve(work, step=self.step + 1, coefficients=coefficients)
            rank_outputs = self._passes.learn(of_step, plan, mini_batch, placed, do)
            refuse_not_finite(rank_outputs, self.step + 1)
            if steering is not None:
                steering.observe(self._passes.merge(rank_outputs, plan.part(mini_batch)).metrics)
            outputs += rank_outputs
            applied.append(self._step_optimizer(self._schedule_settings()).result())
        output = self._passes.merge(outputs, plan.cut)
        count = len(plan)
        reported = {
            "grad_norm": Metric.mean(sum(report.grad_norm for report in applied), count),
            "learning_rate": Metric.mean(sum(report.learning_rate for report in applied), count),
        }
        metrics = {**means_over(output.metrics, count), **reported, **counts_of(plan.columns, plan.cut)}
        return PassResult(metrics, output, self._passes.spans.drain())

    def place(self, plan: Plan) -> None:
        """Weigh, cut and place the first mini-batch of the plan that `train` is called with next, for a call while the ranks work.

        `train` of another plan, or with other parts or columns in force, drops what was placed; its results are the same either way.
        """
        self.group.refuse_ended()
        work = self._learning_pass(per_token_outputs=False, temperature=1.0, bound=NOTHING_BOUND, watch=())
        self._passes.place_ahead(plan, self._passes.columns_of(work))

    def use_loss(self, table: Mapping[str, Any]) -> None:
        """Put another main loss in force, for the passes from now on. Terms and corrections stay, and so does the accumulated gradient.

        `table` is what `[loss]` of a configuration would be: `use`, and the loss's options. Raises ConfigError naming the option, PluginError
        for a loss that is not there, and UnsupportedError for one that the reducer, the model or the backend does not go with, and while a
        mini-batch is accumulated in part.
        """
        loss = self._select("loss", table, "use_loss")
        self._use(self.assembly.with_loss(loss))

    def use_reducer(self, table: Mapping[str, Any]) -> None:
        """Put another reducer in force, for the passes from now on; `table` is what `[reducer]` of a configuration would be.

        Raises as `use_loss` does.
        """
        reducer = self._select("reducer", table, "use_reducer")
        self._use(self.assembly.with_reducer(reducer))

    def _select(self, kind: str, table: Mapping[str, Any], call: str) -> SelectedPlugin:
        self.group.refuse_ended()
        self._gradient.refuse_parts()
        options = {name: value for name, value in table.items() if name != "use"}
        return SelectedPlugin.of(self._registry.resolve(kind, table["use"]), options, call)

    def _use(self, assembly: Assembly) -> None:
        assembly.check(self._files.facts)
        self.group.ask(UsePlugins(assembly.locks))
        self._passes.assembly = assembly

    def add_frozen(self, frozen: FrozenModel) -> None:
        """Load a model onto every rank that scores next to the trained one and that no step changes, in the place of one of its name.

        Raises ModelError.
        """
        self.group.refuse_ended()
        self.group.add_frozen(frozen.name, frozen.model)
        # a frozen model of None is the trained one with its adapters off
        self._frozen[frozen.name] = self._files.facts if frozen.model is None else ModelFacts(frozen.model)

    @property
    def has_adapter_sets(self) -> bool:
        """Say whether `add_adapters` can be used: the model has adapters, not over 4 bits, and the backend declares `adapter_sets`."""
        return has_adapter_sets(self.assembly, self._files.facts.model)

    def add_adapters(self, lora: LoraConfig, *, seed: int | None = None) -> "Engine":
        """Train a further set of adapters on this engine's model, in addition to its own: an engine of its own, on the same ranks.

        The two share the frozen weights and the ranks, and nothing else: adapters, gradients, optimizer, steps, loss in force, random states,
        generator and checkpoints are the set's, with the configuration of this engine and `seed` (None: its own seed) in the place of
        `run.seed`. So the set computes bit for bit what an engine computes that `open` makes with this `lora` and seed. Use both from one
        thread at a time. Closing it frees the set; it is closed before this engine, or with it.

        Raises UnsupportedError where `has_adapter_sets` is False, ModelError for adapters that do not fit, and ConfigError for a seed that
        `run.seed` could not be.
        """
        self.group.refuse_ended()
        refuse_no_adapter_sets(self.assembly, self._files.facts.model)
        files = self._files.with_adapters(lora)
        context = self.assembly.context
        if seed is not None:
            with name_call_in_errors("add_adapters"):
                # the bounds of run.seed
                context = evolve(context, seed=RunConfig(seed=index(seed)).seed)
        parts = Assembly.of(self.assembly.plugins, context, self.group.topology.world_size)
        assembly = evolve(parts, budget_grows=self.assembly.budget_grows)
        group = self.group.add_adapter_set(assembly.worker_spec(files.facts.model, self._optimizer.settings()))
        return Engine(
            assembly,
            group,
            layout=self._layout,
            optimizer=self._optimizer,
            total_steps=self._total_steps,
            files=files,
            registry=self._registry,
            generator=self._generator_table,
        )

    def save(self, directory: str | Path) -> None:
        """Write the whole training state into a directory: weights, optimizer, random states, and how many steps were taken.

        Raises CheckpointError.
        """
        self.group.refuse_ended()
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.group.ask(Save(directory))
        self._describe_state().write(directory)

    def save_async(self, directory: str | Path) -> StateSave:
        """Write what `save` writes while the engine goes on: this returns as soon as every rank has copied its state to host memory.

        `poll` and `result` of what is returned say when the files are whole. A save that is under way is waited for first. Raises
        UnsupportedError of a backend that does not declare the capability `asynchronous_saves`, and CheckpointError.
        """
        self.group.refuse_ended()
        check_asynchronous_saves(self.assembly.plugins["backend"].loaded.record.name, self.assembly.description.capabilities)
        if self._state_save is not None:
            before, self._state_save = self._state_save, None
            before.result()
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._state_save = StateSave(self.group, directory, self._describe_state())
        return self._state_save

    def _describe_state(self) -> EngineState:
        return EngineState(self.step, self._files.facts.rotary_length, self._files.facts.family)

    def list_files(self, directory: Path) -> dict[str, FileFacts]:
        """Return size and SHA-256 sum of every file under `directory`, by its relative path; the ranks share the work."""
        self.group.refuse_ended()
        return self.group.list_files(directory)

    def load(self, directory: str | Path, *, update_generators: bool = True) -> None:
        """Restore what `save` wrote, and give the weights to the generators unless `update_generators` is False. Raises CheckpointError."""
        self.group.refuse_ended()
        directory = Path(directory)
        state = EngineState.read(directory)
        state.refuse_other_model(self._files.facts.family, self._files.facts.rotary_length)
        self.group.ask(Load(directory))
        self._gradient.parts.clear()
        self.step = state.step
        if self._sampler is not None and update_generators:
            self._sampler.update(state.step)

    def export(self, directory: str | Path) -> None:
        """Write the model as a Hugging Face directory, tokenizer included, or its adapters as PEFT takes them. Raises ModelError."""
        self.group.refuse_ended()
        self._files.write(lambda folder: self.group.ask(Export(folder)), Path(directory))

    def keep_model_files(self, directory: Path) -> None:
        """Write into an existing directory what an export of a checkpoint needs of the model in addition to its weights."""
        self.group.refuse_ended()
        self._files.keep(directory)

    @property
    def ended(self) -> str | None:
        """The event that ended the engine, such as "it was closed"; None while it takes calls."""
        return self.group.ended

    def close(self) -> None:
        """End the ranks; of a set that `add_adapters` made, free it. A closed engine refuses every verb; it may be closed again."""
        with finally_close(self.group.close):
            self._end_sampler()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            close_after(error, self.close)
            return
        with finally_close(self.close):
            self.group.settle()

    def drain_peak_bytes(self) -> tuple[int, ...]:
        """Return, by rank, the most bytes of memory up to the last optimizer step and since this was asked before.

        They are those of tensors on a CUDA device, or of the rank's process where it computes on CPUs, and 0 where the system does not say.
        Empty where no step was taken.
        """
        drained, self._peak_bytes = tuple(self._peak_bytes), []
        return drained

    def _schedule_settings(self) -> OptimizerSettings:
        """The configured numbers, at the rate of the next step."""
        rate = scheduled_rate(self._optimizer, self.step, self._total_steps or 1, self._own_schedule)
        return evolve(self._optimizer.settings(), learning_rate=rate)

    def _step_optimizer(self, settings: OptimizerSettings) -> Future[OptimStep]:
        self._gradient.parts.clear()
        self.step += 1

        def read_report(replies: list[StepReply]) -> OptimStep:
            for reply in replies:
                self._passes.spans.add(reply.cpu_seconds)
            seen = [reply.peak_bytes or 0 for reply in replies]
            self._peak_bytes = [max(pair) for pair in zip(seen, self._peak_bytes or seen, strict=True)]
            return replies[0].step

        return self.group.send(StepOptimizer(settings)).on_failure(self._take_back).then(read_report)

    def _facts_of(self, model: str | None) -> ModelFacts:
        """Return the facts of the trained model (None), or of a frozen one. Raises UnsupportedError for one that was not added."""
        if model is None:
            return self._files.facts
        if model not in self._frozen:
            raise UnsupportedError(
                f"there is no frozen model {model!r}", remedy="Add it first: engine.add_frozen(FrozenModel(name, model))"
            )
        return self._frozen[model]

    def _take_back(self) -> None:
        """Count a step that the ranks refused no longer."""
        self.step -= 1

    @property
    def _draws_masks(self) -> bool:
        return self._files.facts.draws_masks

    def _check_columns(self, columns: SampleColumns, model: str | None) -> None:
        facts = self._facts_of(model)
        refuse_unknown_tokens(columns, facts.vocabulary_size)
        if facts.rotary_length is not None:
            refuse_longer_rows(facts.model.path, facts.rotary_length, int(np.diff(columns.token_offsets).max(initial=0)))


def _do_nothing() -> None:
    """Stand for what a caller does not do."""


def _resolve(config: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> ResolvedConfig:
    from skyrl_engine.config import load, resolve

    raw = load(config if isinstance(config, Mapping) else Path(config), overrides)
    return resolve(raw, need=("model",), also=("generator",))
