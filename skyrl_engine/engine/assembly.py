"""The parts of a run that know no data: plugins made, capabilities checked, ranks laid out."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.contracts.kinds.backend import BackendDescription, Capability
from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.merger import Merger
from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.engine.automatic import Collators
from skyrl_engine.engine.capability import (
    check_asynchronous_saves,
    check_capabilities,
    check_layout,
    check_loading,
    check_model,
    check_optimizer,
    check_reducer,
    check_role,
    check_scores,
    collect_required_capabilities,
    needs_of_reducer,
    require_carried,
)
from skyrl_engine.engine.cpu_check import describe_sharing
from skyrl_engine.engine.device_check import refuse_absent_device, refuse_absent_kernels, refuse_absent_packages
from skyrl_engine.engine.devices import refuse_absent_devices
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import Refusals
from skyrl_engine.model_facts.configuration import name_without_weights
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.workers.process_group import FLIGHT_RECORDER
from skyrl_engine.workers.spec import Device, WorkerSpec


@frozen(eq=False)
class Assembly:
    """The controller's share of a run before any data: its plugins at work, and the backend's layout of ranks."""

    plugins: Mapping[str, SelectedPlugin]
    context: FactoryContext
    collator: BoundPlugin[Collator]
    reducer: BoundPlugin[Reducer]
    merger: BoundPlugin[Merger]
    objective: ObjectiveParts
    description: BackendDescription
    collators: Collators | None = None
    """Those among which the engine chooses, where it does; until the data is known, `collator` is the best without it."""

    budget_grows: bool = False
    """A micro-batch may hold the largest unit of a batch where that takes more tokens than the budget, which was chosen before the batch."""

    @classmethod
    def of(cls, plugins: Mapping[str, SelectedPlugin], context: FactoryContext, ranks: int) -> "Assembly":
        """Make the controller's plugins, and describe the backend on so many ranks. Raises what the plugins raise."""
        backend = plugins["backend"]
        return cls(
            plugins=plugins,
            context=context,
            collator=plugins["collator"].bind("collator", context),
            reducer=plugins["reducer"].bind("reducer", context),
            merger=plugins["merger"].bind("merger", context),
            objective=ObjectiveParts.make(plugins, context),
            description=backend.loaded.describe_backend(backend.options, ranks),
        )

    @property
    def needs(self) -> Mapping[str, tuple[str, ...]]:
        """Model scores, columns and values of samples that the objective's parts and the reducer read, by their labels."""
        return {**self.objective.needs, **needs_of_reducer(self.reducer)}

    @property
    def batch_local(self) -> bool:
        """True where the reducer or a loss declares that its values depend on the cut into micro-batches."""
        return self.reducer.product.batch_local or any(part.product.batch_local for part in self.objective.losses)

    def layout(
        self,
        *,
        micro_batch_rows: int | None = None,
        micro_batch_tokens: int | None = None,
        mini_batch_size: int | None = None,
    ) -> Layout:
        """Cut batches into these sizes for the ranks of the run; None: all of it at once."""
        topology = self.description.topology
        return Layout(
            dp=topology.dp,
            tp=topology.tp,
            cp=topology.cp,
            pp=topology.pp,
            mini_batch_size=mini_batch_size,
            micro_batch_rows=micro_batch_rows,
            micro_batch_tokens=micro_batch_tokens,
        )

    def with_collator(self, collator: SelectedPlugin) -> "Assembly":
        """The same parts with another collator. Raises what the plugin raises."""
        plugins = {**self.plugins, "collator": collator}
        return evolve(self, plugins=plugins, collator=collator.bind("collator", self.context))

    def with_loss(self, loss: SelectedPlugin) -> "Assembly":
        """The same parts with another main loss; `check` says whether it goes with them. Raises what the plugin raises."""
        plugins = {**self.plugins, "loss": loss}
        return evolve(self, plugins=plugins, objective=ObjectiveParts.make(plugins, self.context))

    def with_reducer(self, reducer: SelectedPlugin) -> "Assembly":
        """The same parts with another reducer; `check` says whether it goes with them. Raises what the plugin raises."""
        plugins = {**self.plugins, "reducer": reducer}
        return evolve(self, plugins=plugins, reducer=reducer.bind("reducer", self.context))

    @property
    def locks(self) -> dict[str, dict[str, Any]]:
        """All plugins by their place, as another process makes the same of them."""
        return {place: selected.to_lock_entry() for place, selected in self.plugins.items()}

    def worker_spec(
        self,
        model: ModelConfig,
        optimizer: OptimizerSettings | None,
        *,
        device: Device = "auto",
        shown: frozenset[str] = frozenset(),
    ) -> WorkerSpec:
        """Tell every rank what it needs at its start; `shown` as in `WorkerSpec`."""
        return WorkerSpec(
            plugins=self.locks,
            context=self.context,
            model=model,
            optimizer=optimizer,
            topology=self.description.topology,
            device=device,
            shown=shown,
            rows=self.collator.product.rows,
            environment={**FLIGHT_RECORDER, **self.description.environment},
        )

    def check(self, facts: ModelFacts) -> None:
        """Refuse parts that do not go together, and a model that the backend does not train, all at once. Raises UnsupportedError."""
        model, refusals = facts.model, Refusals()
        for term in self.objective.losses:
            with refusals.collect():
                check_role(term)
            with refusals.collect():
                check_reducer(term.label, term.product, self.reducer.name)
        backend = self.plugins["backend"].loaded.record.name
        for label, needs in self.objective.needs.items():
            with refusals.collect():
                check_scores(label, needs, value_head=model.value_head, backend=backend, declared=self.description.capabilities)
        with refusals.collect():
            self.check_backend(facts)
        refusals.raise_all()

    def check_backend(self, facts: ModelFacts) -> None:
        """Refuse a model that the backend in its layout does not train; a missing capability is reported before the backend's own error."""
        self._check_capabilities(facts, ())
        check_layout(Owner.of(self.plugins["backend"].loaded.record), facts, self.description)

    def check_data(self, facts: ModelFacts, datasets: Sequence[SampleColumns]) -> frozenset[Capability]:
        """Refuse data that a part does not carry; returns the capabilities that the backend needs. Raises UnsupportedError."""
        require_carried(self.collator.name, self.collator.product, datasets)
        return self._check_capabilities(facts, datasets)

    def _check_capabilities(self, facts: ModelFacts, datasets: Sequence[SampleColumns]) -> frozenset[Capability]:
        model = facts.model
        required = collect_required_capabilities(
            self.description.topology,
            self.collator.product,
            datasets,
            model,
        )
        check_capabilities(self.plugins["backend"].loaded.record.name, self.description.capabilities, required)
        return required


def assemble(resolved: ResolvedConfig, files: ModelFiles, *, max_sequence_length: int | None, loads: bool = True) -> Assembly:
    """Make the parts of a run and refuse what cannot work together. Starts nothing and reads neither data nor weights.

    `max_sequence_length` in tokens, where one is configured, is for reducers. `loads` is false where no rank loads the model: its weights
    need not be there then. Everything that speaks against it is raised at once:
    UnsupportedError, ModelError for a model or tokenizer that cannot be loaded, and what the plugins raise.
    """
    config = resolved.config
    refusals, here, facts = Refusals(), resolved.assumed.device_bytes is None, files.facts
    if here:
        with refusals.collect():
            describe_sharing(config.run)
        with refusals.collect():
            refuse_absent_devices(config.run)
    else:
        # files of weights are where the devices are
        facts = ModelFacts(name_without_weights(config.model))
    backend = resolved.plugins["backend"]
    readable = False
    with refusals.collect():
        check_model(facts, backend.loaded.describe_backend(backend.options, config.run.ranks))
        readable = True
    pad_token_id = 0
    if readable or config.model.tokenizer is not None:
        with refusals.collect():
            pad_token_id = files.pad_token_id
    assembly = None
    with refusals.collect():
        context = FactoryContext(
            seed=config.run.seed,
            pad_token_id=pad_token_id,
            max_sequence_length=max_sequence_length,
            matmul_precision=config.run.matmul_precision,
        )
        assembly = _make_parts(resolved, facts, context, loads)
        assembly.check(facts)
    if assembly is not None:
        with refusals.collect():
            check_optimizer(config.optimizer, config.model, backend.loaded.record.name, assembly.description.capabilities)
        if config.checkpoint.asynchronous:
            with refusals.collect():
                check_asynchronous_saves(backend.loaded.record.name, assembly.description.capabilities)
    if assembly is not None and readable:
        with refusals.collect():
            assembly.check_backend(facts)
            owner = Owner.of(backend.loaded.record)
            rows = assembly.collator.product.rows
            if loads and (assembly.collators is None or not assembly.collators.has_rehearsed(rows)):
                check_loading(owner, facts, assembly.description, rows)
        if here:
            with refusals.collect():
                refuse_absent_kernels(config.model, config.run, assembly.collator.product.rows)
            with refusals.collect(), blame(Owner.of(backend.loaded.record), "refuse_device"):
                refuse_absent_device(assembly.description, config.model, config.run)
            with refusals.collect():
                refuse_absent_packages(config.optimizer, config.run)
    refusals.raise_all()
    assert assembly is not None, "what hinders it was raised"
    return assembly


def _make_parts(resolved: ResolvedConfig, facts: ModelFacts, context: FactoryContext, loads: bool) -> Assembly:
    """Make the parts; where the engine chooses the collator, with the best one that backend and model support."""
    plugins, ranks = resolved.plugins, resolved.config.run.ranks
    if "collator" in plugins:
        return Assembly.of(plugins, context, ranks)
    backend = plugins["backend"]
    described = backend.loaded.describe_backend(backend.options, ranks)
    collators = Collators(resolved, Owner.of(backend.loaded.record), facts, described, context)
    rows = collators.choose(unpaid=None)[0] if loads else "padded"
    return evolve(Assembly.of({**plugins, "collator": collators.select(rows)}, context, ranks), collators=collators)
