"""Derivatives of a loss by finite differences that agree with autograd: a value that the loss detaches is held constant."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from skyrl_engine.errors import EngineError
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.testing.promise import Undecidable
from skyrl_engine.testing.subject import part_of
from skyrl_engine.testing.tokens.evaluation import SEED, STEP, Listening
from skyrl_engine.testing.tokens.token_batches import TokenBatch

_DETACHING = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]  # a descriptor of C


class _StopGradients(TorchFunctionMode):
    """Intercepts every detached result: of detach() and detach_(), of .data, and of anything computed under no_grad().

    Results inside a torch.autograd.Function are left alone: gradients are off there as well, but it is meant to be differentiated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._off = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:  # noqa: SLF001 - what no_grad() calls; torch shows it to modes like this one
            self._off = not args[0]
        if func is torch.Tensor.detach_:
            with torch.no_grad():
                return result.copy_(self.on_detach(result))
        if isinstance(result, torch.Tensor) and (func in _DETACHING or self._off):
            return self.on_detach(result)
        return result

    def on_detach(self, result: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class RecordingDetached(_StopGradients):
    """Records detached results, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: list[torch.Tensor] = []

    def on_detach(self, result: torch.Tensor) -> torch.Tensor:
        self.constants.append(result.clone())
        return result

    def total(
        self, label: str, loss: Any, batch: TokenBatch, scores: Mapping[str, torch.Tensor], replaying: "ReplayingDetached"
    ) -> float:
        """Return the objective of these scores, without gradients, with every constant as it was recorded."""
        parts = ObjectiveParts(part_of(Listening(loss, replaying), label, "loss"))
        try:
            total, _ = LossObjective(parts, SEED, STEP, per_token_outputs=False)(scores, batch.micro_batch())
        except EngineError as error:
            raise Undecidable(error.cause) from error
        return total.item()


class ReplayingDetached(_StopGradients):
    """Returns the recorded results in place of newly detached ones."""

    def __init__(self, recorded: RecordingDetached) -> None:
        super().__init__()
        self._constants = iter(recorded.constants)

    def on_detach(self, result: torch.Tensor) -> torch.Tensor:
        constant = next(self._constants, None)
        if constant is None or constant.shape != result.shape:
            raise Undecidable("the loss detaches other things where its input is a little different")
        return constant
