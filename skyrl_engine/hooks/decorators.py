"""`@loss` and `@reducer`: a plain function becomes a plugin, in a wheel and in a local file alike."""

import inspect
from collections.abc import Callable
from typing import Any

from attrs import define

from skyrl_engine.contracts.loss import FunctionLoss
from skyrl_engine.contracts.reducer import EmptySequence, FunctionReducer
from skyrl_engine.hooks.markers import hookimpl


@define(eq=False)
class FunctionPlugin:
    """A function that carries hook implementations; calling it calls the function. `config` is the attrs class of its options."""

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

    needs: tuple[str, ...]
    reducers: tuple[str, ...] | None
    batch_local: bool

    @hookimpl
    def skyrl_engine_make_loss(self, config: Any) -> FunctionLoss:
        return FunctionLoss(self.name, self.function, config, self.needs, self.reducers, self.batch_local)


def loss(
    *,
    needs: tuple[str, ...],
    config: type[Any] | None = None,
    reducers: tuple[str, ...] | None = None,
    batch_local: bool = False,
) -> Callable[[Callable[..., Any]], LossPlugin]:
    """Make a loss plugin of `function(tokens, config) -> tensor[n] | LossOutput`.

    `needs` names model scores (`logprobs`, `entropy`, `values`) or data columns; `config` is an attrs class of the loss's options;
    `reducers` restricts which reducers make sense; `batch_local` declares that the loss depends on how the batch is cut, by nature.
    Raises TypeError for names that are not in a tuple and for a function that does not take (tokens, config).
    """
    for option, names in (("needs", needs), ("reducers", reducers)):
        if isinstance(names, str):
            raise TypeError(f"{option} is the text {names!r}; write {option}=({names!r},)")

    def decorate(function: Callable[..., Any]) -> LossPlugin:
        _check_takes(function, "tokens", "config")
        return LossPlugin(function, config, tuple(needs), None if reducers is None else tuple(reducers), batch_local)

    return decorate


@define(eq=False)
class ReducerPlugin(FunctionPlugin):
    """One reducer function as a plugin."""

    negative_weights: bool

    @hookimpl
    def skyrl_engine_make_reducer(self, config: Any) -> FunctionReducer:
        empty_sequence: EmptySequence = getattr(config, "empty_sequence", "count")
        return FunctionReducer(self.name, self.function, config, empty_sequence, self.negative_weights)


def reducer(*, config: type[Any] | None = None, negative_weights: bool = False) -> Callable[[Callable[..., Any]], ReducerPlugin]:
    """Make a reducer plugin of `function(structure, config) -> float64[A]`.

    `config` is an attrs class of the reducer's options; its field `empty_sequence`, if it has one, is what the reducer declares.
    Negative loss weights are refused before the function sees them, unless `negative_weights` says that it can take them.
    Raises TypeError for a function that does not take (structure, config).
    """

    def decorate(function: Callable[..., Any]) -> ReducerPlugin:
        _check_takes(function, "structure", "config")
        return ReducerPlugin(function, config, negative_weights)

    return decorate


def _check_takes(function: Callable[..., Any], *arguments: str) -> None:
    """Refuse at import what would otherwise fail on a rank, in the middle of the first step."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{function.__name__}{signature} must take ({', '.join(arguments)}): {error}") from None
