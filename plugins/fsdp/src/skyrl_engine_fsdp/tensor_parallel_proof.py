"""A check at load that a model was divided correctly: its ranks give the whole model's log-probabilities, and equal shared gradients."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from skyrl_engine import ModelError
from skyrl_engine.contracts import ComputeDtype, ModelConfig
from skyrl_engine.modeling.parity import list_probes
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine_fsdp.gradients import local

TOLERANCE: Final[Mapping[ComputeDtype, float]] = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.05}
"""Largest difference of log-probabilities, relative to 1 + |logprob|; the whole model is computed in its weights' precision."""

AGREEMENT: Final = 1e-3
"""Largest relative difference of gradients that should be equal bit for bit; one that is not summed over ranks differs by about 1."""


def whole_logprobs(model: Any, scorer: Scorer) -> Tensor:
    """Return the log-probabilities of a few tokens, and of an image, under the whole model on the CPU, for `prove` to compare with."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _logprobs(model, scorer, torch.device("cpu"))
    finally:
        model.train(training)


def prove(
    model: Any, scorer: Scorer, mesh: DeviceMesh, device: torch.device, spec: ModelConfig, *, expected: Tensor | None
) -> None:
    """Raises ModelError, on all ranks, if the divided model computes something else than the whole one or shared gradients differ.

    `expected` holds `whole_logprobs` on the rank that computed them. A plan says how modules are divided, and may omit that a gradient must
    be summed; parameters that all ranks of `mesh` hold must get equal gradients, or their copies drift apart in training.
    """
    model.eval()
    logprobs = _logprobs(model, scorer, device)
    torch.autograd.backward(logprobs.sum())
    problem = _difference(logprobs.detach().cpu(), expected, TOLERANCE[spec.dtype])
    # "not <=", so that NaN counts as a disagreement
    apart = [name for name, difference in _disagreements(model, mesh) if not difference <= AGREEMENT]
    if problem is None and apart:
        problem = f"its ranks get different gradients for {apart[0]}, which they share"
    for parameter in model.parameters():
        parameter.grad = None
    model.train()
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for report in problems:
        if report is not None:
            raise ModelError(
                f"{spec.path} ({type(model).__name__}) cannot be cut for tensor parallelism: {report}",
                remedy="Set backend.tensor_parallel = 1, or choose another model or backend",
            )


def _logprobs(model: Any, scorer: Scorer, device: torch.device) -> Tensor:
    return torch.cat([probe.logprobs(scorer) for probe in list_probes(model, scorer.decoder, device)])


def _difference(logprobs: Tensor, expected: Tensor | None, tolerance: float) -> str | None:
    if expected is None:
        return None
    difference = ((logprobs - expected).abs() / (1 + expected.abs())).max().item()
    return None if difference <= tolerance else f"its log-probabilities differ from the whole model's by {difference:.1e}"


def _disagreements(model: Any, mesh: DeviceMesh) -> Iterator[tuple[str, float]]:
    """Yield, for each parameter that all ranks of `mesh` hold, the distance of this rank's gradient from the ranks' mean, relative to it."""
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
    """Return True if the ranks of `mesh`, the last dimension of the gradient's own mesh, hold different parts of the gradient."""
    if not isinstance(gradient, DTensor) or mesh.mesh_dim_names is None:
        return False
    names = gradient.device_mesh.mesh_dim_names or ()
    # tensor-parallel ranks hold different experts, too, where these are shared apart from layers
    if "expert" in names:
        return True
    return mesh.mesh_dim_names[0] in names and not gradient.placements[names.index(mesh.mesh_dim_names[0])].is_replicate()
