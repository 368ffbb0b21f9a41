"""One proof at load that a model was cut rightly: its ranks together say what the whole model says, and agree on what they learn."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from skyrl_engine import ModelError
from skyrl_engine.contracts import ComputeDtype, ModelConfig
from skyrl_engine.modeling.parity import Probe
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine_fsdp.gradients import local

TOLERANCE: Final[Mapping[ComputeDtype, float]] = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.05}
"""Largest difference of log-probabilities, relative to 1 + |logprob|; the whole model is computed in its weights' precision."""

AGREEMENT: Final = 1e-3
"""Largest relative difference of gradients that should be equal bit for bit; one that is not summed over ranks differs by about 1."""


def whole_logprobs(model: Any, scorer: Scorer) -> Tensor:
    """What a whole model on CPU says of a few tokens, for `prove` to compare with."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return Probe.of(model, scorer.decoder, torch.device("cpu")).logprobs(scorer)
    finally:
        model.train(training)


def prove(
    model: Any, scorer: Scorer, mesh: DeviceMesh, device: torch.device, spec: ModelConfig, *, expected: Tensor | None
) -> None:
    """Raises ModelError, on all ranks alike, where the cut model differs from the whole one or its ranks learn different things.

    `expected` is `whole_logprobs` where this rank has them. Plans say how modules are cut, and may forget whose gradients are to be summed:
    parameters that the ranks of `mesh` hold in common must get one gradient, or their copies would drift apart in training.
    """
    model.eval()
    logprobs = Probe.of(model, scorer.decoder, device).logprobs(scorer)
    torch.autograd.backward(logprobs.sum())
    problem = _difference(logprobs.detach().cpu(), expected, TOLERANCE[spec.dtype])
    apart = [name for name, difference in _disagreements(model, mesh) if not difference <= AGREEMENT]  # also true for NaN
    if problem is None and apart:
        problem = f"its ranks get different gradients for {apart[0]}, which they share"
    for parameter in model.parameters():
        parameter.grad = None
    model.train()
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise ModelError(
                f"{spec.path} ({type(model).__name__}) cannot be cut for tensor parallelism: {found}",
                remedy="Set backend.tensor_parallel = 1, or choose another model or backend",
            )


def _difference(logprobs: Tensor, expected: Tensor | None, tolerance: float) -> str | None:
    if expected is None:
        return None
    difference = ((logprobs - expected).abs() / (1 + expected.abs())).max().item()
    return None if difference <= tolerance else f"its log-probabilities differ from the whole model's by {difference:.1e}"


def _disagreements(model: Any, mesh: DeviceMesh) -> Iterator[tuple[str, float]]:
    """For every parameter that the ranks of `mesh` hold in common, how far its gradient here is from their mean, relative to that."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None or _is_cut(parameter.grad, mesh):
            continue
        mine = local(parameter.grad).to(mesh.device_type)
        mean = mine.clone()
        dist.all_reduce(mean, group=mesh.get_group())
        mean /= mesh.size()
        if (difference := (mine - mean).norm().item()) != 0:
            yield name, difference / mean.norm().item() if mean.any() else float("inf")


def _is_cut(gradient: Tensor, mesh: DeviceMesh) -> bool:
    """Whether the ranks of `mesh`, always the last dimension of a parameter's own, hold different parts of it."""
    if not isinstance(gradient, DTensor) or mesh.mesh_dim_names is None:
        return False
    names = gradient.device_mesh.mesh_dim_names or ()
    return mesh.mesh_dim_names[0] in names and not gradient.placements[names.index(mesh.mesh_dim_names[0])].is_replicate()
