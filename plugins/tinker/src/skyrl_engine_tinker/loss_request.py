"""The loss that a request asks for: one of the API's, or an installed one of `serve.losses`, by its name; and the loss in force."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, frozen

from skyrl_engine import ConfigError, Engine, UnsupportedError
from skyrl_engine.contracts import ColumnForm, column_forms
from skyrl_engine_tinker import losses
from skyrl_engine_tinker.errors import RequestError

_SWITCHES = {"true": True, "false": False}


@frozen
class LossRequest:
    """A loss by the name that the request gave it, and what it takes from the request.

    `table` is what `[loss]` of a configuration would be. `defaults` are its inputs, with the number that stands for one that a datum lacks,
    None where it must have it. An installed loss has none: it says itself what it reads, and `weights` are the engine's loss weights. With
    `several` it scores K targets per token.
    """

    name: str
    table: Mapping[str, Any]
    defaults: losses.Inputs | None = None
    several: bool = False

    @classmethod
    def of(cls, request: Any, served: Sequence[str]) -> "LossRequest":
        """Find the loss of a ForwardBackwardRequest. Raises RequestError for one that is not there, and for an option that it does not have."""
        name, options = request.loss_fn, _read_options(request)
        if name in losses.INPUTS:
            several = name == "cross_entropy" and any(map(_has_several_targets, request.data))
            function = losses.SEVERAL if several else name
            return cls(name, {"use": f"{losses.__file__}:{function}"}, _get_api_inputs(name, options), several)
        if name not in served:
            raise RequestError(f"there is no loss {name!r} here; there are {', '.join([*losses.INPUTS, *served])}")
        return cls(name, {"use": name, **options})


@define(eq=False)
class LossInForce:
    """The loss of an engine, which stays in force until a request asks for another."""

    engine: Engine
    _table: Mapping[str, Any] | None = None

    def put(self, request: LossRequest) -> Mapping[str, ColumnForm]:
        """Put a loss in force, and return the columns that it reads. Raises RequestError for what the client can mend."""
        if self._table != request.table:
            # whatever goes wrong between here and there, the next request puts its own
            self._table = None
            try:
                self.engine.use_loss(request.table)
            except ConfigError as error:
                messages = (
                    f"{problem.where.rpartition('loss.')[2]} {problem.cause}. {problem.remedy}" for problem in error.problems
                )
                raise RequestError(f"options of {request.name}: {'; '.join(messages)}") from error
            except UnsupportedError as error:
                raise RequestError(f"{error.cause}; this server adds up tokens (the reducer sum)") from error
            self._table = request.table
        reads = self.engine.assembly.objective.reads
        if of_samples := [need for need in reads if need.startswith("sample:")]:
            raise RequestError(f"{request.name} reads {of_samples[0]}, and datums of this server are no halves of pairs")
        return column_forms(reads)


def _has_several_targets(datum: Any) -> bool:
    # looking up a message that is not there would put one there
    return "target_tokens" in datum.loss_fn_inputs and len(datum.loss_fn_inputs["target_tokens"].shape) > 1


def _read_options(request: Any) -> dict[str, Any]:
    """Options as a configuration writes them: the wire has floats and texts, a schema whole numbers and switches too."""
    options: dict[str, Any] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        options[key] = value.text if value.HasField("text") else value.number
    for key, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"the option {key!r} is {value}; it must be a finite number")
    return {key: _convert_option(value) for key, value in options.items()}


def _convert_option(value: float | str) -> float | bool | str:
    if isinstance(value, str):
        return _SWITCHES.get(value, value)
    return int(value) if value.is_integer() else value


def _get_api_inputs(name: str, options: Mapping[str, Any]) -> losses.Inputs:
    """The inputs of a loss of the API with these options as their defaults."""
    inputs = losses.INPUTS[name]
    known_options = [key for key in losses.OPTIONS if key in inputs]
    for key, number in options.items():
        if key not in known_options:
            raise RequestError(f"{name} has no option {key!r}; it has {', '.join(known_options) or 'none'}")
        if isinstance(number, str | bool) or number < 0:
            raise RequestError(f"the option {key!r} of {name} is {number}; it must be a number of 0 or more")
    return {**inputs, **options}
