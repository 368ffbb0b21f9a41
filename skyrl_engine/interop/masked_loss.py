"""`masked_loss`: use another engine's loss function, which returns one number for padded tensors and a mask, unchanged."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define, field

from skyrl_engine import LossOutput, LossTokens, Metric, loss
from skyrl_engine.contracts.values.outputs import ENGINE_METRICS, Reduction
from skyrl_engine.errors import ContractError
from skyrl_engine.hooks.decorators import LossPlugin
from skyrl_engine.interop.arguments import Arguments, match_arguments
from skyrl_engine.interop.masked_function import MaskedFunction
from skyrl_engine.interop.options import options_class
from skyrl_engine.interop.rows import PaddedPlaces

if TYPE_CHECKING:
    import torch

_REDUCTIONS = ("sum", "token_mean")
_UNCHECKED = object()


def masked_loss(
    function: Callable[..., Any],
    *,
    needs: tuple[str, ...] | None = None,
    config: type[Any] | Mapping[str, Any] | None = None,
    arguments: Mapping[str, str] | None = None,
    per_sequence: tuple[str, ...] = (),
    reduction: str = "sum",
    metrics: tuple[str, ...] | Mapping[str, Reduction] = (),
    reducers: tuple[str, ...] | None = None,
    advised_reducers: tuple[str, ...] | None = None,
    batch_local: bool = False,
    homogeneous: bool = False,
    name: str | None = None,
) -> LossPlugin:
    """Make a loss plugin of `function(log_probs, old_log_probs, advantages, config, loss_mask, ...) -> scalar | (scalar, ...)`.

    The function is called with padded tensors [S, T], one row per sequence of loss-carrying tokens, and a float mask. Its scalar must be
    sum(mask * value); then the derivative by a token's mask value is exactly that token's loss. Any other function is refused with a
    ContractError that names the cause, in the first micro-batch or in the one that shows it.

    `needs` are our names of the columns and scores to pass (None: those of all arguments without a default). `config` is an attrs class, or a
    mapping of options to defaults, nested if the function reads nested options; an argument with an option's name takes that option.
    `arguments` gives the meaning of arguments whose names do not. `per_sequence` are needs that the function takes as [S].
    `reduction="token_mean"` undoes a division by the mask's sum. `metrics` names further values of a returned tuple, in order; as a mapping it
    also gives the reduction of each (otherwise a mean weighted by tokens). The rest is as in `skyrl_engine.loss`. Raises TypeError for
    arguments that cannot be matched.
    """
    if reduction not in _REDUCTIONS:
        raise TypeError(f"reduction must be one of {', '.join(_REDUCTIONS)}, is {reduction!r}")
    called = name or str(getattr(function, "__name__", type(function).__name__))
    schema: type[Any] | None = options_class(f"{called}_options", config) if isinstance(config, Mapping) else config
    options = () if schema is None else [field.name for field in attrs.fields(schema)]
    matched = match_arguments(function, needs=needs, meanings=arguments or {}, options=options)
    for need in per_sequence:
        if need not in matched.needs:
            raise TypeError(f"per_sequence names {need!r}, which {called} does not take")
    adapted = MaskedLoss(called, function, matched, tuple(per_sequence), reduction == "token_mean", metrics, batch_local)
    decorate = loss(
        needs=matched.needs,
        config=schema,
        reducers=reducers,
        advised_reducers=advised_reducers,
        batch_local=batch_local,
        homogeneous=homogeneous,
    )
    return decorate(adapted)


@define(eq=False)
class MaskedLoss:
    """The function that `skyrl_engine.loss` decorates, made of another engine's function."""

    __name__: str
    function: Callable[..., Any]
    arguments: Arguments
    per_sequence: tuple[str, ...]
    normalised: bool
    metrics: tuple[str, ...] | Mapping[str, Reduction]
    batch_local: bool
    _checked_with: object = field(default=_UNCHECKED, init=False)

    def __call__(self, tokens: LossTokens, config: Any) -> "LossOutput | torch.Tensor":
        """Return token losses [n], with the function's metrics if it returns any. Raises ContractError if its scalar is no masked sum."""
        import torch

        from skyrl_engine.interop.linearity import examine, token_losses

        count = len(tokens.sequences.index)
        columns = {need: getattr(tokens, need) for need in self.arguments.needs}
        if not count:
            nothing: torch.Tensor = next(iter(columns.values())) * 0
            return nothing
        call = MaskedFunction(
            self.__name__,
            self.function,
            self.arguments,
            config,
            columns,
            PaddedPlaces.of(tokens.sequences),
            self.per_sequence,
            self.normalised,
            tokens.generator.initial_seed(),
        )
        objection = None
        if self._checked_with is not config:
            objection = examine(call, batch_local=self.batch_local)
        if objection is None:
            self._checked_with = config
            losses, others, objection = token_losses(call, batch_local=self.batch_local)
        if objection is not None:
            raise ContractError(f"{self.__name__} cannot be used as it is: it {objection.cause}", remedy=objection.remedy)
        return LossOutput(losses if torch.is_grad_enabled() else losses.detach(), self._metrics(others, count))

    def _metrics(self, others: tuple[Any, ...], count: int) -> dict[str, Metric]:
        """Return the function's further results as metrics; its name is put before names that the engine uses itself."""
        unnamed = iter(self.metrics)
        values: dict[str, Any] = {}
        for other in others:
            if isinstance(other, Mapping):
                values |= other
            else:
                values[next(unnamed, "")] = other
        if "" in values:
            raise ContractError(
                f"{self.__name__} returns {len(others)} further values, of which not all have names",
                remedy="Name them, in order, in metrics=(...) of masked_loss",
            )
        return {
            f"{self.__name__}_{name}" if name in ENGINE_METRICS else name: self._metric(name, value, count)
            for name, value in values.items()
            if value is not None
        }

    def _metric(self, name: str, value: Any, count: int) -> Metric:
        reduction = self.metrics.get(name, "mean") if isinstance(self.metrics, Mapping) else "mean"
        try:
            # a tensor of one number is not waited for
            number = value.detach().double().reshape(()) if hasattr(value, "detach") else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ContractError(
                f"{self.__name__} returned the metric {name!r} as {type(value).__name__}: {error}", remedy="Return a number"
            ) from None
        return Metric.mean(number * count, count) if reduction == "mean" else Metric(reduction, number)
