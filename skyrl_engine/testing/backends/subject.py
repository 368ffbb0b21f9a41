"""The backend under test, the layouts it claims, and the decorator that makes promises about it."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, field, frozen
from hypothesis import strategies as st

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.backend import BackendDescription, Capability
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.optimizer_settings import AdamWSettings, OptimizerSettings
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.errors import EngineError
from skyrl_engine.proof.layouts import ParallelSizes
from skyrl_engine.testing.backends.bench import Bench, Model
from skyrl_engine.testing.backends.held_backend import SEED, Cut, Opening, PassOrder
from skyrl_engine.testing.backends.ranks import BackendRanks, RankFailed
from skyrl_engine.testing.error_checks import check_says_what_to_do
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, exempt_nobody, promise

LAYOUTS = ("dp1", "dp2")
"""Every backend is tried on these, unless asked otherwise."""

NUMBERS = tuple(range(8))
"""The documents of most batches; one of them is empty."""

UNTOUCHED = AdamWSettings(learning_rate=1e-300, max_grad_norm=None)
"""A step so small that it changes no weight."""


@frozen(eq=False)
class BackendSubject:
    """A backend by its plugin. `layouts` are those it claims, such as "dp2" or "tp2xpp2"; `bench` has the ranks and models for its tests."""

    plugin: SelectedPlugin
    bench: Bench
    layouts: tuple[str, ...] = LAYOUTS
    device: str = "cpu"
    flags: frozenset[str] = field(default=frozenset())

    @property
    def label(self) -> str:
        return str(self.plugin.loaded.record)

    def make(self) -> Any:
        """Return a new backend, not yet set up."""
        return self.plugin.make(FactoryContext())

    def with_options(self, options: Mapping[str, Any]) -> SelectedPlugin:
        """Return the plugin with these options over its own. Raises ConfigError for those it does not take."""
        if not options:
            return self.plugin
        return SelectedPlugin.of(self.plugin.loaded.record, {**self.plugin.table, **options}, "layout")

    def describe(self, options: Mapping[str, Any], ranks: int) -> BackendDescription:
        """Return the backend's description with these options on so many ranks. Raises its error where it refuses them."""
        chosen = self.with_options(options)
        return chosen.loaded.describe_backend(chosen.options, ranks)

    def declares(self, capability: Capability) -> bool:
        return capability in self.describe({}, 1).capabilities

    def open_ranks(
        self,
        case: "BackendCase",
        model: Model | None = None,
        *,
        optimizer: OptimizerSettings | None = UNTOUCHED,
        rows: RowKind = "padded",
        teacher: Model | None = None,
        seed: int = SEED,
        counts_bytes: bool = False,
        files: Path | None = None,
        **options: Any,
    ) -> BackendRanks:
        """Set the backend up on the ranks of the case, with a `teacher` where there is one; `options` are those of the model.

        With `counts_bytes` the ranks can say what they hold. `files` have other weights of the model.
        """
        sizes = case.sizes
        spec = ModelConfig(self.bench.model(model or case.model) if files is None else str(files), **options)
        teacher_config = None if teacher is None else ModelConfig(self.bench.model(teacher))
        lock = self.with_options(sizes.options).to_lock_entry()
        return self.bench.ranks(
            Opening(lock, sizes.topology, spec, optimizer, self.device, rows, teacher_config, seed, counts_bytes)
        )

    def on_another_device(self, case: "BackendCase") -> BackendRanks:
        """Set the backend up on ranks whose device is one that is not the CPU, for `BackendRanks.elsewhere`."""
        from skyrl_engine.testing.other_device import OTHER

        return evolve(self, device=str(OTHER)).open_ranks(case, rows="packed" if self.declares("packed") else "padded")


@frozen
class BackendCase:
    """A layout and a model on which a promise is checked."""

    layout: str
    model: Model = "qwen3"

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes.parse(self.layout)

    def cut(self, numbers: Iterable[int] = NUMBERS, micro_batches: int = 1) -> Cut:
        """Deal the documents to data-parallel ranks, the same for any number of micro-batches, and on each rank to micro-batches."""
        ranks, documents = self.sizes.topology.dp, tuple(numbers)
        shares = (documents[rank::ranks] for rank in range(ranks))
        return tuple(tuple(share[index::micro_batches] for index in range(micro_batches)) for share in shares)

    def whole(self, **options: Any) -> PassOrder:
        """Return a pass over all documents, one micro-batch per rank."""
        return PassOrder(self.cut(), **options)

    def __str__(self) -> str:
        return f"{self.sizes}, {self.model}"


Kind = Literal["every", "one rank", "one data-parallel rank", "several data-parallel ranks", "several ranks"]

LAYOUT_FILTERS: Mapping[Kind, Callable[[ParallelSizes], bool]] = {
    "every": lambda _: True,
    "one rank": lambda sizes: sizes.ranks == 1,
    "one data-parallel rank": lambda sizes: sizes.topology.dp == 1,
    "several data-parallel ranks": lambda sizes: sizes.topology.dp > 1,
    "several ranks": lambda sizes: sizes.ranks > 1,
}


def cases(subject: BackendSubject, layouts: Kind = "every", models: tuple[Model, ...] = ("qwen3",)) -> list[BackendCase]:
    """Return the cases with the smallest layout first, so that the smallest one that breaks a promise is reported."""
    chosen = [name for name in subject.layouts if LAYOUT_FILTERS[layouts](ParallelSizes.parse(name))]
    chosen.sort(key=lambda name: ParallelSizes.parse(name).ranks)
    return [BackendCase(layout, model) for layout in chosen for model in models]


def backend_promise(
    sentence: str,
    *,
    layouts: Kind = "every",
    models: tuple[Model, ...] = ("qwen3",),
    exempt: Callable[[Any], str | None] = exempt_nobody,
) -> Callable[[Callable[[Any, Any], None]], Promise[Any, Any]]:
    """Make a promise from its check over layouts. A failure in it breaks the promise, unless the backend fails without it too."""

    def decorate(check: Callable[[Any, Any], None]) -> Promise[Any, Any]:
        @wraps(check)
        def check_or_undecidable(subject: BackendSubject, case: BackendCase) -> None:
            try:
                check(subject, case)
            except (EngineError, RankFailed) as error:
                require_working(subject, case)
                raise Broken(f"fails: {error.cause}", _remedy(error)) from error

        def exemption(subject: BackendSubject) -> str | None:
            reason = exempt(subject)
            if reason is None and not cases(subject, layouts, models):
                reason = f"no claimed layout has {layouts}"
            return reason

        return promise(sentence, cases=lambda subject: st.sampled_from(cases(subject, layouts, models)), exempt=exemption)(
            check_or_undecidable
        )

    return decorate


def exempt_without(capability: Capability) -> Callable[[BackendSubject], str | None]:
    """Exempt backends that do not declare this capability."""
    return lambda subject: None if subject.declares(capability) else f"the backend does not declare {capability!r}"


def exempt_with(capability: Capability) -> Callable[[BackendSubject], str | None]:
    """Exempt backends that declare this capability."""
    return lambda subject: f"the backend declares {capability!r}" if subject.declares(capability) else None


def require_working(subject: BackendSubject, case: BackendCase) -> None:
    """Raise Undecidable where the backend cannot be set up, score, learn and take a step at all."""
    if case.model == "vision":  # whose tokens these documents do not keep to
        case = evolve(case, model="qwen3")
    try:
        with subject.open_ranks(case) as ranks:
            ranks.forward_backward(case.whole())
            ranks.optim_step()
            ranks.forward(case.whole())
    except (EngineError, RankFailed) as error:
        raise Undecidable(error.cause) from error


def is_right_loss(subject: BackendSubject, case: BackendCase, got: float, numbers: Iterable[int] = NUMBERS, **options: Any) -> bool:
    """Return True where a loss equals that of these documents by definition."""
    due = subject.bench.definition(case.model, numbers, **options).loss
    return abs(got - due) <= 1e-5 * abs(due)


def require_words(error: EngineError) -> None:
    """Raise Broken for a refusal that does not say what to do."""
    try:
        check_says_what_to_do(error)
    except AssertionError as complaint:
        raise Broken(
            f"refuses without saying what to do: {complaint}", "Give the error a cause and one action as its remedy"
        ) from error


def _remedy(error: EngineError | RankFailed) -> str:
    return error.remedy if isinstance(error, EngineError) else "Follow the traceback of that rank"
