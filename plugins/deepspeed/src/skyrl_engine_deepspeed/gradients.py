"""Accumulated gradients under ZeRO: summed over ranks when a step needs them, read whole at any time, dropped without a step.

DeepSpeed finishes the gradient in the backward pass of the last micro-batch before a step. Here that pass is not known beforehand, because
several calls may accumulate. So every backward pass is declared not to be the last, and `reduce` does what the last one would have done. The
loss is multiplied by the world size, which undoes DeepSpeed's mean over ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from skyrl_engine.modeling.norms import clipping_factor, sum_of_squares
from skyrl_engine_deepspeed.fragments import flats


class AccumulatedGradients:
    """The gradients of one engine. `any` is true once a backward pass has run since the last step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._zero: Any = engine.optimizer
        self._stage: int = engine.zero_optimization_stage()
        self.any = False
        engine.set_gradient_accumulation_boundary(False)

    def backward(self, total: Tensor) -> None:
        """Differentiate a micro-batch's part of the objective and add the result to the accumulated gradient."""
        self.any = True
        self._engine.backward(total * dist.get_world_size())

    def reduce(self) -> None:
        """Complete the sum over ranks that the optimizer's step reads."""
        self._engine.set_gradient_accumulation_boundary(True)
        if self._stage < 2:
            self._engine.allreduce_gradients()
        else:
            self._zero.finalize_gradient_accumulation_boundary()

    def norm(self) -> float:
        """Return the 2-norm of the reduced gradient, equal on all ranks; it is not finite if any element is not."""
        squares = sum_of_squares(self._parts(), self._engine.device)
        if self._stage:
            dist.all_reduce(squares)
        return float(squares.sqrt())

    @torch.no_grad()
    def clip(self, norm: float, max_norm: float | None) -> None:
        """Scale the reduced gradient, whose 2-norm is `norm`, so that its norm is at most `max_norm`."""
        if (factor := clipping_factor(norm, max_norm)) is not None:
            for part in self._parts():
                part.mul_(factor)

    def non_finite(self, parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """Return the names of parameters whose reduced gradient is not finite."""
        from deepspeed.utils import safe_get_full_grad

        return [name for name, parameter in parameters.items() if not torch.isfinite(safe_get_full_grad(parameter)).all()]

    def drop(self) -> None:
        """Forget a reduced gradient that is not finite."""
        if self._stage:
            # DeepSpeed checks the gradient itself, and clears it instead of applying it
            self._engine.step()
            assert not self._engine.was_step_applied(), "DeepSpeed applied a gradient that is not finite"
        self.clear()

    def clear(self) -> None:
        """Forget what has accumulated; called after a step, after a load, by `drop` and where a gradient is not wanted."""
        self._engine.zero_grad()
        if self._stage == 2:
            from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

            # sums of earlier passes, which a step hands over, and the count by which the first pass of a step starts them again in host memory
            for sums in (self._zero.all_grad_tensors, self._zero.averaged_gradients):
                sums.update(dict.fromkeys(sums))
            self._zero.micro_step_id = INITIAL_MICRO_STEP_ID
        if self._stage == 3:
            # otherwise a parameter that the next step's first backward pass does not reach would keep this step's gradient
            self._zero.grad_partitions_flat_buffer.zero_()
        self._engine.set_gradient_accumulation_boundary(False)
        self.any = False

    def whole(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """Yield gradients by name, summed over ranks, one at a time, on the CPU, before `reduce`; accumulation can go on afterwards."""
        if not self.any:
            return
        with self._readable():
            for name, parameter in parameters.items():
                yield name, self._whole(parameter).cpu()

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if self._stage >= 2:
            from deepspeed.utils import safe_get_full_grad

            return safe_get_full_grad(parameter).detach()  # type: ignore[no-any-return] # DeepSpeed is untyped
        local = self._local(parameter)
        total = (
            torch.zeros_like(parameter, dtype=torch.float32)
            if local is None
            else local.detach().float().reshape(parameter.shape).clone()
        )
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def _local(parameter: Any) -> Tensor | None:
        """Return the gradient that this rank has accumulated and not yet reduced; stages 0 and 1 keep it in one of three attributes."""
        for place in ("_hp_grad", "grad_accum", "grad"):
            if (kept := getattr(parameter, place, None)) is not None:
                return kept  # type: ignore[no-any-return] # DeepSpeed's attributes
        return None

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Make accumulated gradients readable inside this context, and let accumulation go on afterwards.

        Stages 2 and 3 make their sums readable (under offloading, in host memory) only when they finish a step's gradient.
        """
        if self._stage < 2:
            yield
            return
        kept = {name: dict(getattr(self._zero, name)) for name in ("all_grad_tensors", "averaged_gradients") if self._stage == 2}
        self._zero.finalize_gradient_accumulation_boundary()
        try:
            yield
        finally:
            for name, sums in kept.items():
                groups = getattr(self._zero, name)
                groups.update({group: sums.get(group) for group in groups})
            self._engine.set_gradient_accumulation_boundary(False)

    def _parts(self) -> list[Tensor]:
        """Return this rank's disjoint parts of the reduced gradient; under stage 0 every rank holds all of it."""
        if self._stage == 0:
            return [parameter.grad for parameter in flats(self._engine) if parameter.grad is not None]
        if hasattr(self._zero, "fp32_groups_gradient_flat_partition"):  # stage 1 in bfloat16
            return list(self._zero.fp32_groups_gradient_flat_partition)
        if getattr(self._zero, "cpu_offload", False) or getattr(self._zero, "offload_optimizer", False):
            return [parameter.grad for parameter in flats(self._engine) if parameter.grad is not None]
        return [part for parts in self._zero.averaged_gradients.values() for part in parts]
