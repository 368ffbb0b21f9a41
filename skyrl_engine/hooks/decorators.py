"""`@loss`, `@reducer`, `@advantage`, `@group_filter` and others: a plain function becomes a plugin, in a wheel and in a local file alike."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

from attrs import define

from skyrl_engine.contracts.kinds.advantage import AdvantageClaims, FunctionAdvantage
from skyrl_engine.contracts.kinds.correction import FunctionCorrection
from skyrl_engine.contracts.kinds.group_filter import FunctionGroupFilter
from skyrl_engine.contracts.kinds.loss import FunctionLoss
from skyrl_engine.contracts.kinds.needs import ROLE_NEED
from skyrl_engine.contracts.kinds.reducer import EmptySequence, FunctionReducer
from skyrl_engine.hooks.markers import hookimpl

P = ParamSpec("P")
R = TypeVar("R")

Needs = tuple[str, ...] | Callable[[Any], tuple[str, ...]]
"""Names, or what gives them for a config, where an option decides what is read."""
BatchLocal = bool | Callable[[Any], bool]
"""True for a loss that depends on how the batch is cut, or what says so for a config."""


@define(eq=False)
class FunctionPlugin:
    """A function that carries hook implementations; calling it calls the function. `config` is the attrs class of its options.

    A class that is not `usable_alone` has functions that mean nothing without their plugin.
    """

    usable_alone: ClassVar[bool] = True

    function: Callable[..., Any]
    config: type[Any] | None

    @property
    def name(self) -> str:
        return self.function.__name__

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any] | None:
        return self.config


@define(eq=False)
class LossPlugin(FunctionPlugin):
    """One loss function as a plugin."""

    needs: Needs
    reducers: tuple[str, ...] | None
    advised_reducers: tuple[str, ...] | None
    batch_local: BatchLocal
    homogeneous: bool
    unit_size: int

    @hookimpl
    def skyrl_engine_make_loss(self, config: Any) -> FunctionLoss:
        return FunctionLoss(
            self.name,
            self.function,
            config,
            needs=_with_role(_needs_for(config, self.needs), self.unit_size),
            reducers=self.reducers,
            advised_reducers=self.advised_reducers,
            batch_local=self.batch_local(config) if callable(self.batch_local) else self.batch_local,
            homogeneous=self.homogeneous,
            unit_size=self.unit_size,
        )


def with_parentheses(decorator: Callable[P, R]) -> Callable[P, R]:
    """Make a decorator of options alone say so where it is written above a function without parentheses."""

    @wraps(decorator)
    def told(*given: P.args, **options: P.kwargs) -> R:
        if given:
            name = decorator.__name__
            raise TypeError(f"@{name} takes options alone: write it with parentheses, @{name}(...), above the function")
        return decorator(*given, **options)

    return told


def _with_role(needs: tuple[str, ...], unit_size: int) -> tuple[str, ...]:
    """Samples of a unit are told apart by their role."""
    return needs if unit_size == 1 or ROLE_NEED in needs else (*needs, ROLE_NEED)


@with_parentheses
def loss(
    *,
    needs: Needs,
    config: type[Any] | None = None,
    reducers: tuple[str, ...] | None = None,
    advised_reducers: tuple[str, ...] | None = None,
    batch_local: BatchLocal = False,
    homogeneous: bool = False,
    unit_size: int = 1,
) -> Callable[[Callable[..., Any]], LossPlugin]:
    """Make a loss plugin of `function(tokens, config) -> tensor[n] | LossOutput`.

    `needs` names model scores (`logprobs`, `entropy`, ...) or data columns (`contracts.kinds.needs`), or is a function of the config that
    gives the names;
    `config` is an attrs class of the loss's options; `reducers` restricts which reducers make sense, `advised_reducers` warns of all
    others; `batch_local` declares that the loss depends on how the batch is cut, by nature, or is a function of the config that says so;
    `homogeneous` that advantages times c > 0 give
    every token loss, and its gradient, times c. With `unit_size=2` it compares the chosen and the rejected sample of a unit, by name:

        @loss(needs=("logprobs", "ref_logprobs"), unit_size=2, reducers=("sequence_mean",))
        def preferred(tokens, config):
            gains = tokens.logprobs - tokens.ref_logprobs
            margins = tokens.pairs.chosen.sum(gains) - tokens.pairs.rejected.sum(gains)
            return tokens.pairs.broadcast(-torch.nn.functional.logsigmoid(0.1 * margins))

    Raises TypeError for names that are not in a tuple, for a function that does not take (tokens, config), and for units of other sizes.
    """
    _refuse_text(needs=needs, reducers=reducers, advised_reducers=advised_reducers)
    if unit_size not in (1, 2):
        raise TypeError(f"unit_size is {unit_size}; a loss is given single samples (1) or pairs (2)")

    def decorate(function: Callable[..., Any]) -> LossPlugin:
        _check_takes(function, "tokens", "config")
        return LossPlugin(
            function,
            config,
            needs=needs if callable(needs) else tuple(needs),
            reducers=None if reducers is None else tuple(reducers),
            advised_reducers=None if advised_reducers is None else tuple(advised_reducers),
            batch_local=batch_local,
            homogeneous=homogeneous,
            unit_size=unit_size,
        )

    return decorate


@define(eq=False)
class CorrectionPlugin(FunctionPlugin):
    """One correction function as a plugin."""

    needs: Needs

    @hookimpl
    def skyrl_engine_make_correction(self, config: Any) -> FunctionCorrection:
        return FunctionCorrection(self.name, self.function, config, _needs_for(config, self.needs))


@with_parentheses
def correction(*, needs: Needs, config: type[Any] | None = None) -> Callable[[Callable[..., Any]], CorrectionPlugin]:
    """Make a correction plugin of `function(tokens, config) -> tensor[n]`: the factor of every token's loss, 0 to drop it.

    `needs` names model scores or data columns, as a loss's does; `config` is an attrs class of the options.
    Raises TypeError as `loss` does.
    """
    _refuse_text(needs=needs)

    def decorate(function: Callable[..., Any]) -> CorrectionPlugin:
        _check_takes(function, "tokens", "config")
        return CorrectionPlugin(function, config, needs if callable(needs) else tuple(needs))

    return decorate


@define(eq=False)
class ReducerPlugin(FunctionPlugin):
    """One reducer function as a plugin."""

    negative_weights: bool
    batch_local: bool
    additive: bool
    selective: bool
    needs: Needs

    @hookimpl
    def skyrl_engine_make_reducer(self, config: Any) -> FunctionReducer:
        empty_sequence: EmptySequence = getattr(config, "empty_sequence", "count")
        return FunctionReducer(
            self.name,
            self.function,
            config,
            empty_sequence,
            self.negative_weights,
            self.batch_local,
            self.additive,
            self.selective,
            _needs_for(config, self.needs),
        )


@with_parentheses
def reducer(
    *,
    needs: Needs = (),
    config: type[Any] | None = None,
    negative_weights: bool = False,
    batch_local: bool = False,
    additive: bool = False,
    selective: bool = False,
) -> Callable[[Callable[..., Any]], ReducerPlugin]:
    """Make a reducer plugin of `function(structure, config) -> float64[A]`.

    `needs` names columns of the data that it finds in `structure.columns`, and as `sample:NAME` values of samples, in
    `structure.sample_values`; or gives them for a config. `config` is an attrs class of the reducer's options; its field `empty_sequence`, if
    it has one, is what the reducer declares. Negative loss weights are refused before the function sees them, unless `negative_weights` says
    that it can take them. `batch_local` declares that the weights depend on how the mini-batch is cut into micro-batches, by nature;
    `additive` that a token's weight depends on that token alone; `selective` that it leaves out tokens with loss by intention.
    Raises TypeError for a function that does not take (structure, config), and for names that are not in a tuple.
    """
    _refuse_text(needs=needs)

    def decorate(function: Callable[..., Any]) -> ReducerPlugin:
        _check_takes(function, "structure", "config")
        named = needs if callable(needs) else tuple(needs)
        return ReducerPlugin(function, config, negative_weights, batch_local, additive, selective, named)

    return decorate


Claims = AdvantageClaims | Callable[[Any], AdvantageClaims]
"""Claims, or what gives them for a config, where an option decides."""


@define(eq=False)
class AdvantagePlugin(FunctionPlugin):
    """One estimator of advantages as a plugin."""

    needs: Needs
    claims: Claims

    @hookimpl
    def skyrl_engine_make_advantage(self, config: Any) -> FunctionAdvantage:
        claims = self.claims(config) if callable(self.claims) else self.claims
        return FunctionAdvantage(self.name, self.function, config, _needs_for(config, self.needs), claims)


@with_parentheses
def advantage(
    *, needs: Needs = (), config: type[Any] | None = None, claims: Claims | None = None
) -> Callable[[Callable[..., Any]], AdvantagePlugin]:
    """Make an advantage plugin of `function(batch, config) -> float64[A] | AdvantageOutput`.

    `needs` names columns that it reads beside rewards, `old_values` for instance, or gives them for a config; `config` is an attrs class of
    the estimator's options; `claims` are the facts that planning and the kit may rely on (none: it compares trajectories of a group, and
    nothing else is claimed).
    Raises TypeError for names that are not in a tuple and for a function that does not take (batch, config).
    """
    _refuse_text(needs=needs)

    def decorate(function: Callable[..., Any]) -> AdvantagePlugin:
        _check_takes(function, "batch", "config")
        return AdvantagePlugin(
            function, config, needs if callable(needs) else tuple(needs), AdvantageClaims() if claims is None else claims
        )

    return decorate


@define(eq=False)
class GroupFilterPlugin(FunctionPlugin):
    """One filter of groups as a plugin."""

    @hookimpl
    def skyrl_engine_make_group_filter(self, config: Any) -> FunctionGroupFilter:
        return FunctionGroupFilter(self.name, self.function, config)


@with_parentheses
def group_filter(*, config: type[Any] | None = None) -> Callable[[Callable[..., Any]], GroupFilterPlugin]:
    """Make a group-filter plugin of `function(group, config) -> str | None`; `config` is an attrs class of the filter's options.

    Raises TypeError for a function that does not take (group, config).
    """

    def decorate(function: Callable[..., Any]) -> GroupFilterPlugin:
        _check_takes(function, "group", "config")
        return GroupFilterPlugin(function, config)

    return decorate


def _needs_for(config: Any, needs: Needs) -> tuple[str, ...]:
    """The names for this config; raises TypeError where the plugin's function gives a text."""
    if not callable(needs):
        return needs
    names = needs(config)
    _refuse_text(needs=names)
    return tuple(names)


def _refuse_text(**options: object) -> None:
    """A text is a sequence of letters; taken for names, it would ask for the column 'l'."""
    for option, names in options.items():
        if isinstance(names, str):
            raise TypeError(f"{option} is the text {names!r}; write {option}=({names!r},)")


def _check_takes(function: Callable[..., Any], *arguments: str) -> None:
    """Refuse at import what would otherwise fail on a rank, in the middle of the first step."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{function.__name__}{signature} must take ({', '.join(arguments)}): {error}") from None
