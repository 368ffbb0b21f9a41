"""Exponential moving averages of trained weights, beside the moments of an optimizer and sharded as they are."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyrl_engine.errors import CheckpointError

AVERAGE = "ema"
"""Name of an average in checkpoints, beside those of moments."""


class WeightAverages:
    """One average per tensor that an optimizer changes, in its dtype and placement; none where `decay` is None.

    After step t the average is `decay * average + (1 - decay) * weight`, and after the first step that is averaged the weight itself, as of
    `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`. `values` are the averages by the tensors that they are of.
    """

    def __init__(self, decay: float | None) -> None:
        self.decay = decay
        self.values: dict[Tensor, Tensor] = {}
        self.began = False
        self._away: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def update(self, weights: Iterable[Tensor]) -> None:
        """Average over these weights, all that the optimizer changes on this rank, as a step has left them."""
        if self.decay is None:
            return
        old, new = [], []
        for weight in weights:
            if weight in self.values:
                old.append(_get_local(self.values[weight]))
                new.append(_get_local(weight))
            else:
                self.values[weight] = weight.detach().clone()
        if old:
            torch._foreach_lerp_(old, new, 1 - self.decay)
        self.began = True

    def clear(self) -> None:
        """Forget every average: the next step begins them again."""
        self.values.clear()
        self.began = False

    def offload(self, device: torch.device) -> None:
        """Move averages on `device` to host memory."""
        self._away = tuple(weight for weight, value in self.values.items() if value.device.type == device.type)
        self._move(torch.device("cpu"))

    def reload(self, device: torch.device) -> None:
        """Move them back."""
        self._move(device)
        self._away = ()

    def _move(self, device: torch.device) -> None:
        for weight in self._away:
            self.values[weight] = self.values[weight].to(device)


def no_averages_error(directory: Path) -> CheckpointError:
    """Return the error for a checkpoint that was to give averages and has none."""
    return CheckpointError(
        f"the checkpoint in {directory} holds no average of its weights",
        remedy="Choose a checkpoint of a run with optimizer.ema_decay, after its first step, or do without averages (--ema)",
    )


def _get_local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
